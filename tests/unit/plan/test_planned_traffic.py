"""The bytes that each rank sends in a step follow from the schedule."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Compressor, SyncPlan, builders, compile_plan
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.workload import Variable, Workload

NUMEL = 1000
SIZE = 4 * (NUMEL + 1)
"""Bytes of a message of one float32 variable and its count."""
WORKLOAD = Workload(name="one", variables=(Variable(name="weight", shape=(NUMEL,), dtype="float32"),))


def of(plan: SyncPlan, cluster: ClusterSpec, workload: Workload = WORKLOAD) -> list[float] | None:
    return sent_bytes(compile_plan(plan, workload, cluster))


def test_a_native_all_reduce_counts_as_a_ring() -> None:
    cluster = ClusterSpec.uniform(4)
    assert of(builders.all_reduce(WORKLOAD, cluster), cluster) == pytest.approx([2 * 3 / 4 * SIZE] * 4)


def test_a_server_sends_the_sum_to_each_other_rank() -> None:
    cluster = ClusterSpec.uniform(4)
    plan = builders.build("ps", WORKLOAD, cluster)
    found = of(plan, cluster)
    assert found is not None
    assert sorted(found) == [SIZE, SIZE, SIZE, 3 * SIZE]


def test_shared_memory_sends_nothing() -> None:
    cluster = ClusterSpec.uniform(1, devices=4)
    assert of(builders.shared_memory(WORKLOAD, cluster), cluster) == [0.0] * 4


def test_compressed_elements_count_as_encoded_and_counts_do_not() -> None:
    cluster = ClusterSpec.uniform(2)
    plan = builders.all_reduce(WORKLOAD, cluster)
    half = plan.model_copy(
        update={
            "groups": tuple(each.model_copy(update={"compressor": Compressor(kind="fp16")}) for each in plan.groups)
        }
    )
    exact, small = of(plan, cluster), of(half, cluster)
    assert exact is not None
    assert small is not None
    assert small[0] == pytest.approx(exact[0] / 2, rel=0.01)


@pytest.mark.parametrize(
    "builder", [name for name in builders.names() if name not in ("shared_memory", "gathered_rows")]
)
def test_all_ranks_together_send_what_any_exact_method_needs(builder: str) -> None:
    cluster = ClusterSpec.uniform(4, bandwidth="1 Gbit/s")
    found = of(builders.build(builder, WORKLOAD, cluster), cluster)
    assert found is not None
    assert sum(found) == pytest.approx(2 * 3 * SIZE, rel=0.01)


def test_tables_of_which_touched_rows_travel_are_unknown() -> None:
    table = Variable(name="table", shape=(5000, 4), dtype="float32", kind="row_sparse")
    workload, cluster = Workload(name="table", variables=(table,)), ClusterSpec.uniform(2)
    plan = builders.build("ps", workload, cluster)
    assert of(plan, cluster, workload) is None
