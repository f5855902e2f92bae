"""What the replay asks for sums in shared memory."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.simulator import Constants, replay
from lightning_autosync.workload import Variable, Workload

ELEMENTS = 8_000_000
WORKLOAD = Workload(name="one", variables=(Variable(name="v", shape=(ELEMENTS,), dtype="float32"),))


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_adds_and_copies_its_part(ranks: int, detail: str) -> None:
    cluster = ClusterSpec.uniform(1, devices=ranks)
    schedule = compile_plan(builders.shared_memory(WORKLOAD, cluster), WORKLOAD, cluster)
    constants = Constants(reduce_rate=2e9, copy_rate=4e9, message_cost=0, cores=1)
    found = replay(schedule, WORKLOAD, cluster, constants, detail).synchronization_time
    bytes_of_others = 4 * (ELEMENTS + 1) * (ranks - 1) / ranks
    assert found == pytest.approx(ranks * bytes_of_others * (1 / 2e9 + 1 / 4e9))


def test_a_hand_over_costs_something() -> None:
    cluster = ClusterSpec.uniform(1, devices=2)
    small = Workload(
        name="many", variables=tuple(Variable(name=f"v{n}", shape=(8,), dtype="float32") for n in range(9))
    )
    times = []
    for size in (1, 10**9):
        schedule = compile_plan(builders.shared_memory(small, cluster, bucket_bytes=size), small, cluster)
        times.append(replay(schedule, small, cluster).step_time)
    assert times[0] > times[1]
