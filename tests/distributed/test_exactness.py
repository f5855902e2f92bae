"""Exact plans train as DDP does, to floating-point order."""

from __future__ import annotations

from random import Random

import pytest
import training
from clusters import asymmetric_cluster, shared_nodes, uneven_cluster
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plans import plans
from sweeps import examples, sweep
from training import Net

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, topologies
from lightning_autosync.workload import describe

SPANNING = [name for name in builders.names() if name not in ("shared_memory", "gathered_rows")]
"""Builders of plans for several nodes in which all parameters may have any topology."""

SHORT = ["byteps"]
"""In single precision, `make test` tries all builders with their own topologies, and random plans any."""


@pytest.mark.parametrize("size", sweep([2, 3, 4, 5], [5]))
@pytest.mark.parametrize("builder", sweep(SPANNING, SHORT))
def test_every_builder_and_topology_equals_ddp(pool, builder: str, size: int) -> None:
    cluster = uneven_cluster(size)
    workload = describe(Net().double())
    names = topologies.everywhere()
    plans = [builders.build(builder, workload, cluster, topology=topology).to_dict() for topology in names]
    for found in pool.run(training.distances, plans=plans, cluster=cluster.to_dict(), double=True)[:size]:
        assert max(found) < 1e-12, dict(zip(names, found, strict=True))


@pytest.mark.parametrize("size", sweep([1, 2, 3, 4, 5], [1, 5]))
def test_shared_memory_equals_ddp(pool, size: int) -> None:
    cluster = ClusterSpec.uniform(1, devices=size)
    workload = describe(Net().double())
    made = [builders.shared_memory(workload, cluster, bucket_bytes=limit).to_dict() for limit in (1, 1000, 10**8)]
    for found in pool.run(training.distances, plans=made, cluster=cluster.to_dict(), double=True)[:size]:
        assert max(found) < 1e-12


@pytest.mark.parametrize("size", sweep([4, 5], [5]))
def test_pairs_of_trees_equal_ddp(pool, size: int) -> None:
    cluster = asymmetric_cluster("mesh", size, Random(0))
    workload = describe(Net().double())
    made = [builders.packed_trees(workload, cluster, bucket_bytes=limit) for limit in (1, 1000, 10**8)]
    assert any(tree.broadcast for tree in made[0].groups[0].trees)
    answers = pool.run(
        training.distances, plans=[plan.to_dict() for plan in made], cluster=cluster.to_dict(), double=True
    )
    for found in answers[:size]:
        assert max(found) < 1e-12


@pytest.mark.parametrize("size", sweep([2, 3, 4, 5], [4, 5]))
def test_exchanges_between_pairs_equal_ddp(pool, size: int) -> None:
    cluster = uneven_cluster(size)
    workload = describe(Net().double())
    made = [
        builders.all_reduce(workload, cluster, topology=topology, bucket_bytes=limit)
        for topology in ("recursive_doubling", "halving_doubling")
        for limit in (1, 1000, 10**8)
    ]
    answers = pool.run(
        training.distances, plans=[plan.to_dict() for plan in made], cluster=cluster.to_dict(), double=True
    )
    for found in answers[:size]:
        assert max(found) < 1e-12


@examples(8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_exact_plans_equal_ddp(pool, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5), label="ranks")
    machine = ClusterSpec.uniform(1, devices=size, bandwidth=1e7)
    cluster = data.draw(st.sampled_from([uneven_cluster(size), shared_nodes(size), machine]), label="cluster")
    workload = describe(Net().double())
    drawn = [data.draw(plans(workload, size, one_node=cluster is machine), label="plan") for _ in range(5)]
    answers = pool.run(
        training.distances,
        plans=[plan.to_dict() for plan in drawn],
        cluster=cluster.to_dict(),
        double=True,
    )
    for found in answers[:size]:
        for plan, distance in zip(drawn, found, strict=True):
            assert distance < 1e-12, plan.describe()


@pytest.mark.parametrize("builder", sweep(["ps", "all_reduce"], ["ps"]))
def test_waiting_where_parameters_are_used_equals_ddp(pool, builder: str) -> None:
    cluster = uneven_cluster(pool.world_size)
    workload = describe(Net().double())
    plans = [builders.build(builder, workload, cluster, topology=topology) for topology in topologies.everywhere()]
    made = [plan.to_dict() for plan in plans]
    for found in pool.run(training.overlapped_distances, plans=made, cluster=cluster.to_dict()):
        for plan, (distance, under_way) in zip(plans, found, strict=True):
            assert distance < 1e-12, plan.describe()
            assert under_way == len(plan.groups)


def test_single_precision_equals_ddp(pool) -> None:
    cluster = shared_nodes(4)
    workload = describe(Net())
    made = [builders.build(name, workload, cluster) for name in SPANNING]
    for found in pool.run(
        training.distances, plans=[plan.to_dict() for plan in made], cluster=cluster.to_dict(), steps=3
    )[:4]:
        assert max(found) < 1e-5
