"""Exact plans train as DDP does, to floating-point order."""

from __future__ import annotations

import pytest
from clusters import shared_nodes, uneven_cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import plans
from training import Net

from lightning_autosync.plan import TOPOLOGIES, builders
from lightning_autosync.workload import describe


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("builder", builders.BUILDERS)
def test_every_builder_and_topology_equals_ddp(pool, builder: str, size: int) -> None:
    cluster = uneven_cluster(size)
    workload = describe(Net().double())
    plans = [builders.build(builder, workload, cluster, topology=topology).to_dict() for topology in TOPOLOGIES]
    for found in pool.run("training:distances", plans=plans, cluster=cluster.to_dict(), double=True)[:size]:
        assert max(found) < 1e-12, dict(zip(TOPOLOGIES, found, strict=True))


@settings(max_examples=45, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_exact_plans_equal_ddp(pool, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5), label="ranks")
    cluster = data.draw(st.sampled_from([uneven_cluster(size), shared_nodes(size)]), label="cluster")
    workload = describe(Net().double())
    drawn = [data.draw(plans(workload, size), label="plan") for _ in range(5)]
    answers = pool.run(
        "training:distances",
        plans=[plan.to_dict() for plan in drawn],
        cluster=cluster.to_dict(),
        double=True,
    )
    for found in answers[:size]:
        for plan, distance in zip(drawn, found, strict=True):
            assert distance < 1e-12, plan.describe()


def test_single_precision_equals_ddp(pool) -> None:
    cluster = shared_nodes(4)
    workload = describe(Net())
    made = [builder(workload, cluster) for builder in builders.BUILDERS.values()]
    for found in pool.run(
        "training:distances", plans=[plan.to_dict() for plan in made], cluster=cluster.to_dict(), steps=5
    )[:4]:
        assert max(found) < 1e-5
