"""The bound by its prices: a checker of its own, which knows only the file of the cluster.

Prices of channels prove a bound if every pair of a reduce tree and a broadcast tree costs at least 1, each arc by its
cheapest route: the channels carry no more than their bandwidths, so no more than ``sum of price x bandwidth`` bytes/s
are synchronized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import networkx
import pytest
from cluster_strategies import alike_clusters, fabrics, leaves_and_spines, random_clusters, two_links_a_node
from hypothesis import given
from sweeps import examples, sweep

from lightning_autosync.cluster import (
    ClusterSpec,
    LinkGraph,
    binding_channels,
    resolve_cluster,
    shipped_clusters,
    sketches,
    synchronization_limit,
)
from lightning_autosync.cluster.classes import RankClasses
from lightning_autosync.cluster.columns import Packing
from lightning_autosync.cluster.cuts import find_cuts
from lightning_autosync.cluster.sketches import class_prices


def channels(spec: ClusterSpec) -> Iterator[tuple[str, str, float]]:
    """Source, target and bytes/s of both directions of each link, and of the way from a device to its node."""
    for link in spec.links:
        assert link.bandwidth is not None
        assert link.reverse_bandwidth is not None
        yield link.a, link.b, link.bandwidth
        yield link.b, link.a, link.reverse_bandwidth
    for rank, place in enumerate(places(spec)):
        if place == f"rank {rank}":
            node = spec.nodes[spec.rank_nodes[rank]].name
            yield place, node, spec.local_bandwidth
            yield node, place, spec.local_bandwidth


def places(spec: ClusterSpec) -> list[str]:
    """[ranks] the place of each rank in the graph."""
    nodes = [spec.nodes[index] for index in spec.rank_nodes]
    return [node.name if node.devices == 1 else f"rank {rank}" for rank, node in enumerate(nodes)]


def least_cost(lengths: dict[int, dict[int, float]], root: int) -> float:
    """Cost of the cheapest tree of arcs away from the root."""
    arcs = networkx.DiGraph()
    arcs.add_weighted_edges_from((i, j, lengths[i][j]) for i in lengths for j in lengths if j not in (i, root))
    tree = networkx.minimum_spanning_arborescence(arcs, preserve_attrs=True)
    return float(tree.size(weight="weight"))


def check_prices(spec: ClusterSpec, rate: float, prices: Mapping[str, float]) -> None:
    """The prices, by "source > target", prove that no trees on any routes exceed the rate."""
    bandwidths = {f"{source} > {target}": bandwidth for source, target, bandwidth in channels(spec)}
    assert prices.keys() <= bandwidths.keys()
    assert all(price >= 0 for price in prices.values())
    assert sum(price * bandwidths[name] for name, price in prices.items()) == pytest.approx(rate)

    graph = networkx.DiGraph()
    for source, target, _ in channels(spec):
        graph.add_edge(source, target, weight=prices.get(f"{source} > {target}", 0.0))
    paths = dict(networkx.all_pairs_dijkstra_path_length(graph))
    ends = dict(enumerate(places(spec)))
    down = {i: {j: paths[ends[i]][ends[j]] for j in ends} for i in ends}
    up = {i: {j: down[j][i] for j in ends} for i in ends}
    for root in ends:
        assert least_cost(up, root) + least_cost(down, root) >= 1 - 1e-8


def check_limit(spec: ClusterSpec) -> None:
    """The prices of the bound prove it."""
    limit = synchronization_limit(spec)
    check_prices(spec, limit.rate, limit.prices)


@pytest.mark.parametrize("name", sweep(shipped_clusters(), {*shipped_clusters()} - {"four_racks_of_four"}))
def test_the_bound_of_a_shipped_cluster_is_proved(name: str) -> None:
    check_limit(resolve_cluster(name))


@given(random_clusters(max_ranks=6) | fabrics(max_ranks=6))
@examples(40)
def test_the_bound_of_a_random_cluster_is_proved(spec: ClusterSpec) -> None:
    if spec.world_size > 1:
        check_limit(spec)


@pytest.mark.parametrize(
    "spec",
    [
        leaves_and_spines(leaves=2, spines=2, nodes_per_leaf=4),
        leaves_and_spines(leaves=4, spines=2, nodes_per_leaf=2, uplink=0.3e6),
        two_links_a_node(nodes=6),
        ClusterSpec.star([4e6, 1e6, 1e6, 1e6]),
        ClusterSpec.uniform(nodes=5, bandwidth=1e6),
    ],
    ids=["two spines", "slow spines", "two links a node", "a slow leaf", "equal leaves"],
)
def test_the_bound_of_a_fabric_is_proved(spec: ClusterSpec) -> None:
    check_limit(spec)


@given(random_clusters(max_ranks=6) | fabrics(max_ranks=6))
@examples(30)
def test_each_cut_is_proved(spec: ClusterSpec) -> None:
    names = [f"{source} > {target}" for source, target, _ in channels(spec)]
    for cut in find_cuts(LinkGraph(spec)) if spec.world_size > 1 else ():
        priced = zip((names[index] for index in cut.channels), cut.prices.tolist(), strict=True)
        check_prices(spec, cut.rate, dict(priced))


def test_the_channels_that_bind_and_their_shares() -> None:
    """The uplinks of two racks in one direction of each; all links of equal nodes alike."""
    racks = binding_channels(ClusterSpec.racks(racks=2, nodes_per_rack=4, bandwidth=50e6, uplink=25e6))
    assert sum(racks.values()) == pytest.approx(1)
    assert {name for name, share in racks.items() if share > 1e-6} <= {
        f"{a} > {b}" for rack in ("rack0", "rack1") for a, b in ((rack, "core"), ("core", rack))
    }
    assert binding_channels(ClusterSpec.star([4e6, 1e6, 2e6])) == {"node1 > switch": 0.5, "switch > node1": 0.5}
    equal = binding_channels(ClusterSpec.uniform(nodes=4, bandwidth=1e6))
    ways = [(f"node{index}", "switch") for index in range(4)]
    assert equal == pytest.approx({f"{a} > {b}": 0.125 for way in ways for a, b in (way, way[::-1])})


@pytest.mark.parametrize(
    "spec",
    [ClusterSpec.star([4e6, 1e6, 2e6]), ClusterSpec.racks(racks=2, nodes_per_rack=3, bandwidth=5e6, uplink=2e6)],
    ids=["star", "racks"],
)
def test_the_bound_rises_by_at_most_the_share_of_a_faster_channel(spec: ClusterSpec) -> None:
    before, shares = synchronization_limit(spec).rate, binding_channels(spec)
    data = spec.to_dict()
    for number, link in enumerate(data["links"]):
        for ends, faster in ((("a", "b"), "bandwidth"), (("b", "a"), "reverse_bandwidth")):
            name = " > ".join(link[end] for end in ends)
            rates = {"reverse_bandwidth": link["bandwidth"], **link, faster: 1.01 * link["bandwidth"]}
            links = [*data["links"][:number], rates, *data["links"][number + 1 :]]
            after = synchronization_limit(ClusterSpec.from_dict({**data, "links": links})).rate
            assert after <= before * (1 + 0.01 * shares.get(name, 0.0) + 1e-6)


@given(alike_clusters(max_ranks=6) | random_clusters(max_ranks=6, symmetric=True))
@examples(40)
def test_prices_of_classes_prove_their_bound(spec: ClusterSpec) -> None:
    link_graph = LinkGraph(spec)
    if spec.world_size > 1 and (prices := class_prices(link_graph)) is not None:
        names = [channel.name for channel in link_graph.channels]
        check_prices(spec, float(link_graph.capacities @ prices), dict(zip(names, prices.tolist(), strict=True)))


def test_prices_of_classes_that_are_a_little_too_low_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column generation may end with prices under which a tree costs less than 1 by its tolerance."""
    spec = ClusterSpec.racks(racks=2, nodes_per_rack=3, bandwidth=5e6, uplink=2e6)
    link_graph, solve = LinkGraph(spec), sketches.sketch_packing

    def solved(classes: RankClasses) -> Packing[sketches.Sketch]:
        packing = solve(classes)
        return replace(packing, prices=(1 - 1e-6) * packing.prices)

    monkeypatch.setattr(sketches, "sketch_packing", solved)
    prices = class_prices(link_graph)
    assert prices is not None
    names = [channel.name for channel in link_graph.channels]
    check_prices(spec, float(link_graph.capacities @ prices), dict(zip(names, prices.tolist(), strict=True)))


def test_a_bound_cannot_be_changed_by_its_caller() -> None:
    limit = synchronization_limit(ClusterSpec.uniform(nodes=4, bandwidth=1e6))
    with pytest.raises(TypeError):
        limit.prices["node0 > switch"] = 1.0  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        limit.cuts[0].prices[0] = 1.0
    assert isinstance(hash(limit), int)


def test_one_rank_has_no_channel_that_binds() -> None:
    assert binding_channels(ClusterSpec.uniform(1)) == {}
