"""Cuts: bounds by hand, beside the linear program, and for clusters that are too large for it."""

from __future__ import annotations

import numpy
import pytest
from cluster_strategies import random_clusters
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from sweeps import examples

from lightning_autosync.cluster import ClusterSpec, LinkGraph, bounds, synchronization_limit
from lightning_autosync.cluster.cuts import Cut, find_cuts, one_switch_cuts, undominated
from lightning_autosync.cluster.packing import best_packing, mirrored_packing

MB = 1e6


def cut(rate: float, links: float) -> Cut:
    """A cut whose channels do not matter."""
    return Cut(rate, links, numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0))


def thousand() -> ClusterSpec:
    return ClusterSpec.racks(racks=32, nodes_per_rack=32, bandwidth=50 * MB, uplink=250 * MB)


@pytest.fixture
def without_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """No linear program is solved."""

    def refuse(*_: object) -> None:
        raise AssertionError("a linear program of a million pairs of ranks")

    bounds.synchronization_limit.cache_clear()
    monkeypatch.setattr(bounds, "channel_prices", refuse)


def test_a_burst_passes_beside_the_rate() -> None:
    one = cut(rate=MB, links=2.0)
    assert one.seconds(3 * MB) == 3.0
    assert one.seconds(3 * MB, burst=0.5 * MB) == 2.0
    assert one.seconds(3 * MB, burst=2 * MB) == 0.0


def test_only_cuts_that_can_decide_are_kept() -> None:
    slow, fast, faster = cut(1.0, 2.0), cut(2.0, 1.0), cut(3.0, 1.5)
    assert undominated([faster, fast, slow, slow]) == [slow, fast]


@pytest.mark.parametrize(
    ("bandwidths", "size", "burst", "seconds"),
    [
        ([4 * MB, MB, MB, MB], MB, 0.0, 1.0),  # a leaf sends it all
        ([4 * MB, MB, MB, MB], MB, 0.25 * MB, 0.75),
        ([MB] * 4, MB, 0.0, 1.5),  # all together send six times as much
        ([MB] * 4, MB, 0.25 * MB, 1.25),  # ... of which each link passes a burst
        ([MB] * 4, MB, 2 * MB, 0.0),
    ],
)
def test_one_switch_by_hand(bandwidths: list[float], size: float, burst: float, seconds: float) -> None:
    limit = synchronization_limit(ClusterSpec.star(bandwidths))
    assert limit.exact
    assert limit.seconds(size, burst) == pytest.approx(seconds)


def test_one_switch_of_any_size_has_a_closed_form(without_program: None) -> None:
    limit = synchronization_limit(ClusterSpec.uniform(nodes=2000, bandwidth=MB))
    assert limit.exact
    assert limit.seconds(MB) == pytest.approx(2 * 1999 / 2000)


def test_a_thousand_ranks_without_classes_get_a_cut_bound(
    without_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes together send 2 x 1023 times the size; a rack's uplink and a node's link would allow more."""
    monkeypatch.setattr(bounds, "class_prices", lambda link_graph: None)
    limit = synchronization_limit(thousand())
    bounds.synchronization_limit.cache_clear()
    assert not limit.exact
    assert limit.rate == pytest.approx(1024 * 50 * MB / (2 * 1023))


@pytest.mark.parametrize(
    ("uplink", "rate"),
    [
        (250 * MB, 1024 * 50 * MB / (2 * 1023)),
        (40 * MB, 32 * 40 * MB / (2 * 31)),  # between the racks it is a switch with 32 links
        (10 * MB, 32 * 10 * MB / (2 * 31)),
    ],
)
def test_cuts_between_racks_and_around_nodes(uplink: float, rate: float) -> None:
    spec = ClusterSpec.racks(racks=32, nodes_per_rack=32, bandwidth=50 * MB, uplink=uplink)
    assert find_cuts(LinkGraph(spec))[0].rate == pytest.approx(rate)


def test_a_slow_link_of_one_rack_is_a_cut() -> None:
    data = ClusterSpec.racks(racks=2, nodes_per_rack=40, bandwidth=50 * MB, uplink=500 * MB).to_dict()
    slow = next(link for link in data["links"] if "node3" in (link["a"], link["b"]))
    slow["bandwidth"] = 5 * MB
    assert synchronization_limit(ClusterSpec.from_dict(data)).cuts[0] == cut(5 * MB, 1.0)


@given(random_clusters(max_ranks=7))
@examples(60)
def test_no_cut_is_below_what_trees_reach(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        link_graph = LinkGraph(spec)
        reached = best_packing(link_graph).rate
        assert find_cuts(link_graph)[0].rate >= reached * (1 - 1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        ClusterSpec.racks(racks=2, nodes_per_rack=4, bandwidth=50 * MB, uplink=25 * MB),
        ClusterSpec.racks(racks=4, nodes_per_rack=2, bandwidth=50 * MB, uplink=40 * MB),
        ClusterSpec.uniform(nodes=2, devices=4, bandwidth=125 * MB),
        ClusterSpec.star([50 * MB, 12.5 * MB, 12.5 * MB, 12.5 * MB]),
    ],
    ids=["two racks", "four racks", "two nodes of four", "fat node"],
)
def test_on_trees_of_equal_links_the_cuts_are_exact(spec: ClusterSpec) -> None:
    assert find_cuts(LinkGraph(spec))[0].rate == pytest.approx(mirrored_packing(LinkGraph(spec)).rate, rel=1e-5)


@given(random_clusters(max_ranks=6), st.floats(0.0, 3.0))
@examples(40)
def test_with_bursts_no_packing_is_faster_than_the_bound(spec: ClusterSpec, part: float) -> None:
    """The least time of the same trees where each direction of a link carries a burst too: a program of its own."""
    if spec.world_size == 1:
        return
    link_graph = LinkGraph(spec)
    packing = best_packing(link_graph)
    unit = float(link_graph.capacities.min())
    burst = part * unit
    shaped = (numpy.arange(len(link_graph.channels)) < 2 * len(spec.links)) * burst
    rows = numpy.column_stack([packing.loads.toarray() * unit, -link_graph.capacities]) / unit
    goal = numpy.append(numpy.zeros(len(packing.columns)), 1.0)
    whole = numpy.append(numpy.ones(len(packing.columns)), 0.0)[None]
    found = linprog(goal, rows, shaped / unit, whole, [1.0])
    assert found.success
    assert synchronization_limit(spec).seconds(unit, burst) <= found.fun * (1 + 1e-5) + 1e-9


def test_equal_cuts_of_one_switch() -> None:
    assert one_switch_cuts([MB, MB], [0, 2]) == [cut(MB, 1.0)]
