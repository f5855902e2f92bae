"""Row-wise messages are exact on every topology, and only touched rows travel."""

from __future__ import annotations

import pytest
import recommender
from clusters import shared_nodes, uneven_cluster
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plans import plans
from recommender import ROWS, WIDTH, Recommender, workload_of
from sweeps import examples, sweep

from lightning_autosync.plan import builders, topologies

KINDS = {"sparse": True, "row_sparse": False}
PAIRS = [(kind, builder) for kind in KINDS for builder in ("all_reduce", "ps", "partitioned_ps", "byteps")]


@pytest.mark.parametrize("case", sweep(PAIRS, [("sparse", "all_reduce"), ("row_sparse", "byteps")], ids="-".join))
@pytest.mark.parametrize("size", sweep([2, 3, 5], [3]))
def test_rows_equal_dense_ddp_on_every_topology(pool, case: tuple[str, str], size: int) -> None:
    kind, builder = case
    cluster = shared_nodes(size)
    workload = workload_of(Recommender(sparse=False), kind)
    names = topologies.everywhere()
    made = [builders.build(builder, workload, cluster, topology=topology).to_dict() for topology in names]
    arguments = {"plans": made, "cluster": cluster.to_dict(), "sparse": KINDS[kind]}
    for found in pool.run(recommender.row_distances, **arguments)[:size]:
        assert max(found) < 1e-12


def test_a_rank_that_does_not_touch_the_table(pool) -> None:
    cluster = uneven_cluster(3)
    workload = workload_of(Recommender(sparse=False), "row_sparse")
    made = [builders.all_reduce(workload, cluster, topology=topology).to_dict() for topology in topologies.everywhere()]
    arguments = {"plans": made, "cluster": cluster.to_dict(), "sparse": False, "idle_rank": 1}
    for found in pool.run(recommender.row_distances, **arguments)[:3]:
        assert max(found) < 1e-12


@examples(5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_with_rows_equal_dense_ddp(pool, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    cluster = shared_nodes(size)
    workload = workload_of(Recommender(sparse=False), kind)
    drawn = [data.draw(plans(workload, size)).to_dict() for _ in range(4)]
    arguments = {"plans": drawn, "cluster": cluster.to_dict(), "sparse": KINDS[kind]}
    for found in pool.run(recommender.row_distances, **arguments)[:size]:
        assert max(found) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_keep_their_layout_and_few_bytes_travel(pool, kind: str) -> None:
    cluster = uneven_cluster(4)
    workload = workload_of(Recommender(sparse=False), kind)
    plan = builders.ps(workload, cluster)
    answers = pool.run(recommender.gradient_kinds, plan=plan.to_dict(), cluster=cluster.to_dict(), sparse=KINDS[kind])
    for layout, touched, sent in answers[:4]:
        assert layout == ("torch.sparse_coo" if kind == "sparse" else "torch.strided")
        assert touched == [0, 1, 2, 3, 20]
        assert sent < 3 * ROWS * WIDTH * 8 / 2


@pytest.mark.parametrize("kind", KINDS)
def test_idle_ranks_get_the_layout_of_the_others_and_unused_tables_none(pool, kind: str) -> None:
    arguments = {"cluster": uneven_cluster(3).to_dict(), "sparse": KINDS[kind]}
    layout = "torch.sparse_coo" if kind == "sparse" else "torch.strided"
    assert pool.run(recommender.layouts_of_idle_ranks, touched=True, **arguments)[:3] == [[layout]] * 3
    assert pool.run(recommender.layouts_of_idle_ranks, touched=False, **arguments)[:3] == [[None]] * 3
