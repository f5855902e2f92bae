"""Common values of measured rates that differ by noise alone."""

from __future__ import annotations

import numpy
import pytest

from lightning_autosync.cluster import ClusterSpec, LinkGraph, pack_trees, synchronization_limit
from lightning_autosync.cluster.classes import rank_classes
from lightning_autosync.measure.probe.common_rates import with_common_rates
from lightning_autosync.measure.probe.description import check_rates
from lightning_autosync.measure.probe.shape import Hosts, make_cluster
from lightning_autosync.measure.probe.survey import Survey

Links = list[tuple[float, float]]


def noisy(links: Links, noise: float, seed: int = 0) -> Links:
    errors = numpy.random.default_rng(seed).normal(1.0, noise, (len(links), 2))
    return [(one, other) for one, other in (errors * links).tolist()]


def described(links: Links, racks: int) -> ClusterSpec:
    """What a probe describes by measured rates up and down: of ``racks`` uplinks, then of nodes, equally many each."""
    trunks, ways = links[:racks], links[racks:]
    nodes = numpy.arange(len(ways)).reshape(racks, -1)
    groups = {tuple(members): trunk for members, trunk in zip(nodes.tolist(), trunks, strict=True)}
    up, down = ([way[end] for way in ways] for end in (0, 1))
    hosts = Hosts([[node] for node in range(len(ways))], [f"host{node}" for node in range(len(ways))])
    latencies = {(0, node): 20e-6 * (1 + 0.1 * (node % 7)) for node in range(1, len(ways))}
    return make_cluster("found", hosts, Survey(up, down, numpy.zeros((0, 0)), trunks=groups), latencies)


@pytest.mark.parametrize("noise", [0.01, 0.02])
def test_racks_of_alike_nodes_are_alike_if_measured(noise: float) -> None:
    true: Links = [(4e8, 4e8)] * 4 + [(1e8, 1e8)] * 512
    cluster = described(noisy(true, noise), racks=4)
    classes = rank_classes(LinkGraph(cluster))
    assert classes
    assert len(classes) <= 12
    limit, truth = synchronization_limit(cluster), synchronization_limit(described(true, racks=4))
    assert limit.exact
    assert limit.rate == pytest.approx(truth.rate, rel=0.01)
    assert pack_trees(cluster).rate >= 0.98 * limit.rate


@pytest.mark.parametrize("seed", range(5))
def test_links_of_a_few_nodes_get_common_rates_up_and_down(seed: int) -> None:
    found = with_common_rates(noisy([(4e8, 4e8), *[(1e8, 1e8)] * 7], 0.005, seed))
    assert all(one == other for one, other in found)
    assert len(set(found[1:])) == 1
    assert found[1][0] == pytest.approx(1e8, rel=0.005)


def test_links_that_are_faster_in_one_direction_stay_so() -> None:
    found = with_common_rates(noisy([(1e8, 2e7)] * 100, 0.01))
    assert len(set(found)) == 1
    assert found[0] == pytest.approx((1e8, 2e7), rel=0.01)


@pytest.mark.parametrize(
    "links",
    [
        [(1e7, 4e7), (2e7, 3.2e7), (3e7, 2.4e7), (4e7, 1.6e7)],
        [(1e8, 1e8), (1.03e8, 1.03e8), (1.06e8, 1.06e8)],
        [(1e8, 1e8), (1e8, 1e8), (1e8, 0.97e8)],
        [(1e8, 1.002e8), (1.05e8, 1.06e8), (1.1e8, 1.107e8)],
    ],
)
def test_rates_that_differ_by_more_than_noise_stay(links: Links) -> None:
    found = with_common_rates(links)
    assert found == [pytest.approx(both, rel=0.006) for both in links]


def test_rates_with_a_gap_between_them_stay_apart_if_noise_spans_more() -> None:
    found = with_common_rates([(1e8, 1.01e8), (1.005e8, 0.995e8), (1.05e8, 1.06e8), (1.055e8, 1.045e8)])
    assert found == [pytest.approx(both, rel=1e-3) for both in [(1e8, 1e8)] * 2 + [(1.05e8, 1.05e8)] * 2]


@pytest.mark.parametrize("nodes", [4, 64])
def test_among_few_ranks_rates_stay_as_measured(nodes: int) -> None:
    links: Links = [(1e8, 1e8)] * 2 + [(1e8 + 1e6 * (node % 4),) * 2 for node in range(nodes)]
    assert {link.bandwidth for link in described(links, racks=2).links} == {1e8, 1.01e8, 1.02e8, 1.03e8}


def test_no_rate_moves_further_than_noise_spans() -> None:
    """Rates in steps of a percent: without a limit all of them would have one value."""
    links: Links = [(1.01**k, 1.01**k) for k in range(100)]
    for (one, other), both in zip(links, with_common_rates(links), strict=True):
        assert both == pytest.approx((one, other), rel=0.02)


def test_two_measurements_of_the_same_links_have_not_changed_and_a_slow_link_is_told() -> None:
    true: Links = [(4e8, 4e8)] * 2 + [(1e8, 1e8)] * 80
    slow = [*true[:-1], (6e7, 6e7)]
    before, again, changed = (
        described(noisy(links, 0.01, seed), racks=2) for seed, links in enumerate([true, true, slow])
    )
    assert check_rates(before, again, "before") == []
    told = check_rates(before, changed, "before")
    assert told
    assert all("host79" in line for line in told)
