"""What the replay asks for sums in shared memory."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload

ELEMENTS = 8_000_000
WORKLOAD = Workload(name="one", variables=(Variable(name="v", shape=(ELEMENTS,), dtype="float32"),))


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_adds_and_copies_its_part(ranks: int, detail: str) -> None:
    cluster = ClusterSpec.uniform(1, devices=ranks)
    schedule = compile_plan(builders.shared_memory(WORKLOAD, cluster), WORKLOAD, cluster)
    constants = Constants.ideal().model_copy(update={"reduce_rate": 2e9, "copy_rate": 4e9, "cores": 1.0})
    found = Replay(WORKLOAD, cluster, constants).predict(schedule, detail).synchronization_time
    bytes_of_others = 4 * (ELEMENTS + 1) * (ranks - 1) / ranks
    into_the_gradient = 4 * ELEMENTS / 4e9
    assert found == pytest.approx(ranks * (bytes_of_others * (1 / 2e9 + 1 / 4e9) + into_the_gradient))


def test_costs_that_differ_by_many_orders_come_to_an_end() -> None:
    """Shares of cores are subtracted from each other; what rounding leaves must be nobody's."""
    variables = (
        Variable(name="front", shape=(64, 9), ready=0.02),
        Variable(name="rows", shape=(200, 30), kind="row_sparse", rows=8.0, ready=0.01),
        Variable(name="b", shape=(64,)),
    )
    workload = Workload(name="small", variables=variables, forward_time=0.01, backward_time=0.02)
    cluster = ClusterSpec.star([4e7, 1e7, 1e7], latency="50 us")
    schedule = compile_plan(builders.build("ps", workload, cluster), workload, cluster)
    constants = Constants(cores=4, merge_cost=1000, accelerated=True)
    assert 1000 < Replay(workload, cluster, constants).predict(schedule).step_time < 1e6


def test_a_hand_over_costs_something() -> None:
    cluster = ClusterSpec.uniform(1, devices=2)
    small = Workload(
        name="many", variables=tuple(Variable(name=f"v{n}", shape=(8,), dtype="float32") for n in range(9))
    )
    times = []
    for size in (1, 10**9):
        schedule = compile_plan(builders.shared_memory(small, cluster, bucket_bytes=size), small, cluster)
        times.append(Replay(small, cluster).predict(schedule).step_time)
    assert times[0] > times[1]


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("ranks", "cores", "seconds"), [(4, 2.0, 0.02), (4, 1.0, 0.04), (4, None, 0.01), (2, 4.0, 0.01)]
)
def test_main_threads_share_the_cores(ranks: int, cores: float | None, seconds: float, detail: str) -> None:
    cluster = ClusterSpec.uniform(ranks, bandwidth=1e12)
    work = Workload(name="ten", variables=tuple(Variable(name=f"v{n}", shape=(1,)) for n in range(10)))
    schedule = compile_plan(builders.all_reduce(work, cluster), work, cluster)
    constants = Constants.ideal().model_copy(update={"gradient_cost": 1e-3, "cores": cores})
    assert Replay(work, cluster, constants).predict(schedule, detail).step_time == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_main_threads_and_transports_add_up_on_shared_cores(detail: str) -> None:
    cluster = ClusterSpec.uniform(4, bandwidth=1e12)
    names = [f"v{n}" for n in range(12)]
    variables = tuple(Variable(name=name, shape=(8,), ready=0.01 * (n + 1)) for n, name in enumerate(names))
    work = Workload(name="twelve", variables=variables, backward_time=0.12)
    schedule = compile_plan(builders.packed_trees(work, cluster, bucket_bytes=1), work, cluster)
    costs = {"gradient_cost": 4e-3, "frame_cost": 1e-3, "cores": 2.0}
    found = Replay(work, cluster, Constants.ideal().model_copy(update=costs)).predict(schedule, detail)
    # Every sum goes up and down between four ranks in pieces, each of them sent and received.
    frames = sum(6 * -(-(t.stop - t.start) // t.segment) for m in schedule.messages for t in m.rounds[0].transfers)
    least = (4 * 12 * 4e-3 + 2 * frames * 1e-3) / 2
    assert least < found.step_time < 1.35 * least
