"""Rows that travel once train as DDP does, with dense and with sparse gradients of the table."""

from __future__ import annotations

from random import Random

import pytest
import recommender
from clusters import asymmetric_cluster, shared_nodes, uneven_cluster
from recommender import Recommender, workload_of
from sweeps import crossed

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders

KINDS = {"sparse": True, "row_sparse": False}
CLUSTERS = {
    "star": uneven_cluster(4),
    "two a node": shared_nodes(4),
    "racks": asymmetric_cluster("racks", 4, Random(3)),
    "unknown rates": ClusterSpec.uniform(2, devices=2),
    "three": uneven_cluster(3),
    "two": ClusterSpec.uniform(2),
}


@pytest.mark.parametrize(("name", "kind"), crossed(list(CLUSTERS), list(KINDS)))
def test_training_equals_ddps(pool, name: str, kind: str) -> None:
    """Batches of all ranks touch one row in a step, and accumulated gradients several."""
    cluster, workload = CLUSTERS[name], workload_of(Recommender(sparse=False), kind)
    plan = builders.gathered_rows(workload, cluster).to_dict()
    arguments = {"plans": [plan], "cluster": cluster.to_dict(), "sparse": KINDS[kind]}
    for micro_batches in (1, 3):
        for found in pool.run(recommender.row_distances, micro_batches=micro_batches, **arguments)[
            : plan["world_size"]
        ]:
            assert max(found) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_touch_the_table(pool, kind: str) -> None:
    cluster = CLUSTERS["racks"]
    plan = builders.gathered_rows(workload_of(Recommender(sparse=False), kind), cluster).to_dict()
    arguments = {"plans": [plan], "cluster": cluster.to_dict(), "sparse": KINDS[kind], "idle_rank": 1}
    for found in pool.run(recommender.row_distances, **arguments)[:4]:
        assert max(found) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_idle_ranks_get_the_layout_of_the_others_and_unused_tables_none(pool, kind: str) -> None:
    arguments = {"cluster": uneven_cluster(3).to_dict(), "sparse": KINDS[kind], "builder": "gathered_rows"}
    layout = "torch.sparse_coo" if kind == "sparse" else "torch.strided"
    assert pool.run(recommender.layouts_of_idle_ranks, touched=True, **arguments)[:3] == [[layout]] * 3
    assert pool.run(recommender.layouts_of_idle_ranks, touched=False, **arguments)[:3] == [[None]] * 3


def test_rows_are_sent_once_to_each_rank(pool) -> None:
    """A rank that touches rows 0 and 20 of 24 bytes, and their indices, sends them to the hub, which forwards them."""
    cluster = uneven_cluster(4)
    plan = builders.gathered_rows(workload_of(Recommender(sparse=False), "row_sparse"), cluster)
    answers = pool.run(recommender.gradient_kinds, plan=plan.to_dict(), cluster=cluster.to_dict(), sparse=False)
    for copies, (layout, touched, sent) in zip((3 + 3 * 2, 1, 1, 1), answers[:4], strict=True):
        assert layout == "torch.strided"
        assert touched == [0, 1, 2, 3, 20]
        assert copies * 2 * 26 < sent < copies * (2 * 26 + 60)  # and the headers
