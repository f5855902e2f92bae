"""Meshes of ranks, and how fast bytes travel along their dimensions."""

from __future__ import annotations

import math
from itertools import chain, combinations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ClusterError
from lightning_autosync.hybrid.mesh import Links, near_order, shapes
from lightning_autosync.hybrid.plan import groups_along

MBIT = 1e6 / 8


def _along(sizes: tuple[int, ...], ranks: tuple[int, ...], dimensions: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return groups_along(numpy.array(ranks).reshape(sizes), dimensions)


@given(st.integers(1, 128))
def test_shapes_are_all_factorizations(ranks: int) -> None:
    found = shapes(ranks)
    assert all(math.prod(shape) == ranks for shape in found)
    assert len(set(found)) == len(found)
    if ranks > 1:
        assert found[0] == (ranks,)
        pairs = [(first, ranks // first) for first in range(2, ranks) if ranks % first == 0]
        assert [shape for shape in found if len(shape) == 2] == pairs


def test_ranks_of_a_node_are_neighbours_along_the_last_dimension() -> None:
    cluster = ClusterSpec.uniform(2, 2, "200 Mbit/s").with_rank_order(["node0", "node1", "node0", "node1"])
    assert near_order(cluster) == (0, 2, 1, 3)
    links, order = Links(cluster), near_order(cluster)
    across, within = (links.pace(_along((2, 2), order, (dimension,))) for dimension in (0, 1))
    assert across.ring == pytest.approx(2 / (200 * MBIT))  # both ranks of a node send over its link
    assert within.ring == pytest.approx(1 / cluster.local_bandwidth)


def test_ranks_of_a_rack_are_neighbours_along_the_last_dimension() -> None:
    cluster = ClusterSpec.racks(2, 4, "1 Gbit/s", "1 Gbit/s")
    links, order = Links(cluster), near_order(cluster)
    across, within = (links.pace(_along((2, 4), order, (dimension,))) for dimension in (0, 1))
    assert across.ring == pytest.approx(4 * within.ring)


@examples(30)
@given(st.data())
def test_the_pace_is_that_of_the_routes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["star", "uniform", "racks"]))
    rates = st.sampled_from(["100 Mbit/s", "1 Gbit/s", "3 Gbit/s"])
    if kind == "star":
        cluster = ClusterSpec.star([data.draw(rates) for _ in range(4)], devices=2, latency="50 us")
    elif kind == "uniform":
        cluster = ClusterSpec.uniform(4, 2, data.draw(rates))
    else:
        cluster = ClusterSpec.racks(2, 2, data.draw(rates), data.draw(rates), devices=2, latency="20 us")
    sizes = data.draw(st.sampled_from(shapes(8)))
    ranks = tuple(data.draw(st.permutations(range(8))))
    links = Links(cluster)
    for dimensions in chain(*(combinations(range(len(sizes)), count + 1) for count in range(len(sizes)))):
        groups = _along(sizes, ranks, dimensions)
        ring = [(group[i], group[(i + 1) % len(group)]) for group in groups for i in range(len(group))]
        routed = links._routed(numpy.array(groups), ring)
        found = links.pace(groups)
        assert found.ring == pytest.approx(routed.ring)
        assert found.spread == pytest.approx(routed.spread)
        assert found.latency == pytest.approx(routed.latency)


def test_links_that_form_loops_have_routes() -> None:
    names = ["a", "b", "c"]
    data = {
        "format": "autosync-cluster/1",
        "name": "triangle",
        "nodes": [{"name": name} for name in names],
        "links": [
            {"a": "a", "b": "b", "bandwidth": "100 Mbit/s"},
            {"a": "b", "b": "c", "bandwidth": "100 Mbit/s"},
            {"a": "c", "b": "a", "bandwidth": "50 Mbit/s"},
        ],
    }
    pace = Links(ClusterSpec.from_dict(data)).pace([[0, 1, 2]])
    assert pace.ring == pytest.approx(1 / (50 * MBIT))
    assert pace.spread == pytest.approx(0.5 / (50 * MBIT))


def test_unknown_rates_are_refused() -> None:
    with pytest.raises(ClusterError, match="unknown"):
        Links(ClusterSpec.uniform(4))
