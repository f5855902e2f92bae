"""Collectives in two levels, as NCCL runs them, here on gloo."""

from __future__ import annotations

import pytest
import training
from sweeps import crossed

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.workers import WorkerPool


@pytest.fixture(scope="module")
def four(pytestconfig) -> WorkerPool:
    """Two nodes of two: the groups are made of the default process group, which must have their size."""
    tests = pytestconfig.rootpath / "tests"
    with WorkerPool(4, extra_paths=[tests, tests / "distributed"], timeout=60.0) as workers:
        yield workers


@pytest.mark.parametrize(
    ("builder", "order"), crossed(["hierarchical", "partitioned_all_reduce"], [None, ["n0", "n1", "n0", "n1"]])
)
def test_two_levels_equal_ddp(four, builder: str, order: list[str] | None) -> None:
    cluster = ClusterSpec.uniform(nodes=2, devices=2)
    if order is not None:
        names = [node.name for node in cluster.nodes]
        cluster = cluster.with_rank_order([names[int(name[1])] for name in order])
    for found in four.run(training.two_level_distance, builder=builder, cluster=cluster.to_dict()):
        assert found < 1e-12


def test_engines_that_follow_each_other_share_the_groups(four) -> None:
    cluster = ClusterSpec.uniform(nodes=2, devices=2).to_dict()
    counts = []
    for _ in range(4):
        four.run(training.two_level_distance, builder="hierarchical", cluster=cluster)
        counts.append(four.run(training.group_count))
    assert counts == [counts[0]] * 4


@pytest.mark.parametrize("hierarchical", [False, True])
def test_groups_last_as_long_as_a_job_uses_them(four, hierarchical: bool) -> None:
    cluster = ClusterSpec.uniform(2, 2, "1 Gbit/s").to_dict()
    found = four.run(training.groups_of_a_measuring_job, hierarchical=hierarchical, cluster=cluster)
    assert found == [[2 * hierarchical, 0]] * 4


def test_a_rank_that_has_no_memory_is_an_error_on_all(four) -> None:
    cluster = ClusterSpec.uniform(nodes=2, devices=2)
    first, second = (node.name for node in cluster.nodes)
    unused = cluster.with_rank_order([first, second, second, first])  # its groups are made for this engine
    errors = four.run(training.two_level_without_memory, cluster=unused.to_dict(), rank=1)
    assert errors == ["rank 1: no memory is left"] * 4


def test_a_plan_that_needs_new_groups_is_not_opened_beside_training(four) -> None:
    cluster = ClusterSpec.uniform(nodes=2, devices=2).to_dict()
    assert four.run(training.opening_beside_training, builder="all_reduce", cluster=cluster) == ["opened"] * 4
    for error in four.run(training.opening_beside_training, builder="hierarchical", cluster=cluster):
        assert error == "schedule: plans with two-level collectives cannot be tried while a job trains"
