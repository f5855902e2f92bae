"""Packing spanning trees into a cluster: the trees of the ``packed`` topology and the share of data on each.

The linear program is that of fractional tree packing (Edmonds 1973; used for collectives by Blink, MLSys 2020). Each
tree carries its share of the data up to its root and, mirrored, back down. So a tree edge {i, j} loads the routes i to
j and j to i once each, and the root does not matter. The cheapest tree under channel prices is then a minimum spanning
tree.

Reducing and broadcasting along the same tree is optimal if all links are symmetric. Otherwise pairs of a reduce tree
and a broadcast tree with the same root are packed, up to `EXACT_RANKS` ranks. The cheapest pair under channel prices is
then two minimum spanning arborescences.

Where each node has several network interfaces, trees over all of these are packed together. All edges of a tree (or of
a pair) use one interface.

Beyond `EXACT_RANKS` ranks the program is solved for classes of alike ranks (:mod:`.sketches`), if the cluster has them,
and its solution is spread over the ranks of each class (:mod:`.spreading`). Trees over several interfaces are then
packed for each interface by itself, if the interfaces do not slow each other down on links that they share. Without
classes the program over all pairs of ranks is solved for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar

import numpy
from scipy.sparse import csc_array, csr_array

from lightning_autosync.cluster.classes import RankClasses, rank_classes
from lightning_autosync.cluster.columns import Packing, Vector, cheapest_weights, generate_columns
from lightning_autosync.cluster.link_graph import LinkGraph
from lightning_autosync.cluster.sketches import Sketch, sketch_packing
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.spreading import spread_trees
from lightning_autosync.cluster.trees import (
    EdgeTree,
    Parents,
    centres,
    chains,
    height,
    hierarchical_trees,
    least_arborescence,
    least_tree,
    root_at,
    stars,
    tree_of,
)

EXACT_RANKS = 64
"""Largest number of ranks for which pairs of trees are packed. Beyond it, classes of alike ranks are used if there are
any."""

TreePair = tuple[Parents, Parents]
"""A reduce tree and a broadcast tree with the same root."""


_Tree = TypeVar("_Tree")
Routed = tuple[_Tree, int]
"""A tree or a pair of trees, and the interface over which its edges are routed."""

_RATE_KEPT_FOR_SHALLOW = 0.99
_WORTH_OF_RATE = 0.5  # in levels of height
_WORTH_OF_WORK = 0.1  # below the worth of rate for any tree, as no rank has world_size neighbours
_RATE_KEPT_IN_ALL = 0.98
_SMALLEST_WEIGHTS = (0.005, 0.001, 0.0)
_RATE_KEPT_OF_SKETCHES = 0.999
_TREES_OF_CLASSES = (32, 64, 128)


@dataclass(frozen=True)
class PackedTree:
    """One tree of a packing, or a pair of trees with the same root.

    Attributes:
        weight: share of the data on the tree; all weights sum to 1.
        parents: [ranks] parent of each rank in the reduce tree, -1 at the root.
        broadcast: the same in the broadcast tree; None for the same edges back.
        interface: interface of each node over which the ranks are connected, 0 for the first.
    """

    weight: float
    parents: Parents
    broadcast: Parents | None = None
    interface: int = 0


@dataclass(frozen=True)
class TreePacking:
    """Trees that together synchronize ``rate`` bytes/s (infinite for one rank), heaviest first."""

    rate: float
    trees: tuple[PackedTree, ...]


@lru_cache(maxsize=64)
def pack_trees(spec: ClusterSpec, pairs: bool = True) -> TreePacking:
    """A few shallow trees that reach at least 98% of the best packing's rate, with one exception.

    Up to `EXACT_RANKS` ranks, they are pairs of trees where single trees do not reach that rate because links are
    asymmetric. With more ranks they are always single trees, and the best rate is that of single trees. The exception
    is more ranks that fall into classes: if 128 trees do not reach 98%, the best trees that were found are returned.

    Args:
        pairs: whether a broadcast tree may differ from its reduce tree; if not, the best rate is that of single trees.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    link_graph = LinkGraph(spec)
    if spec.world_size == 1:
        return TreePacking(math.inf, (PackedTree(1.0, (-1,)),))
    if spec.world_size > EXACT_RANKS and (spread := _packing_of_classes(link_graph)):
        return spread
    single = _few_trees(mirrored_packing(link_graph), link_graph)
    if link_graph.symmetric or spec.world_size > EXACT_RANKS or not pairs:
        return single
    # Single trees come first, because there are fewer of them: probed links always differ a little by direction.
    paired = paired_packing(link_graph)
    return single if single.rate >= _RATE_KEPT_IN_ALL * paired.rate else _few_trees(paired, link_graph)


def _few_trees(packing: Packing[Routed[EdgeTree]] | Packing[Routed[TreePair]], link_graph: LinkGraph) -> TreePacking:
    weights = _shallow_weights(packing, link_graph.capacities, link_graph.world_size)
    rate, weights = drop_small(weights, packing, link_graph.capacities, _RATE_KEPT_IN_ALL * packing.rate)
    return TreePacking(rate, _root_trees(packing.columns, weights, link_graph.world_size))


def _packing_of_classes(link_graph: LinkGraph) -> TreePacking | None:
    """Trees for classes of alike ranks over each interface; None without classes, or if interfaces share a full link.

    No packing is faster than the best ones of the interfaces together.
    """
    spec = link_graph.spec
    classes = [rank_classes(LinkGraph(spec.over(interface))) for interface in range(spec.interface_count)]
    parts = [_spread_packing(each) for each in classes if each]
    if len(parts) < len(classes):
        return None
    if len(parts) == 1:
        return parts[0]
    total = sum(part.rate for part in parts)
    trees = [
        replace(tree, weight=tree.weight * part.rate / total, interface=interface)
        for interface, part in enumerate(parts)
        for tree in part.trees
    ]
    transfers = (transfers_of((tree.parents, tree.parents)) for tree in trees)  # these have no trees of pairs
    loads = link_graph.load_rows(transfers, [tree.interface for tree in trees]).T @ [tree.weight for tree in trees]
    rate = filling_rate(loads, link_graph.capacities)
    if rate < _RATE_KEPT_OF_SKETCHES * total:
        return None
    return TreePacking(rate, tuple(sorted(trees, key=lambda tree: -tree.weight)))


def _spread_packing(classes: RankClasses) -> TreePacking:
    """The fewest trees that reach enough of the best rate; if none do, those that reach most."""
    packing = sketch_packing(classes)
    shares = _shallow_sketches(packing, classes)
    reached: dict[float, tuple[list[EdgeTree], Vector]] = {}
    for count in _TREES_OF_CLASSES:
        divided = [
            (sketch, share / turns)
            for sketch, share in shares
            for turns in [max(1, round(share * count))]
            for _ in range(turns)
        ]
        trees = list(spread_trees(classes, divided))
        weights = numpy.array([weight for _, weight in divided])
        loads = sum(
            weight * classes.loads(numpy.array(list(tree))) for weight, tree in zip(weights, trees, strict=True)
        )
        rate = filling_rate(numpy.asarray(loads), classes.link_graph.capacities)
        reached[rate] = trees, weights
        if rate >= _RATE_KEPT_IN_ALL * packing.rate:
            break
    rate = max(reached)
    trees, weights = reached[rate]
    return TreePacking(rate, _root_trees([(tree, 0) for tree in trees], weights, classes.link_graph.world_size))


def _shallow_sketches(packing: Packing[Sketch], classes: RankClasses) -> list[tuple[Sketch, float]]:
    """Sketches with shares that sum to 1; they reach nearly the best rate and prefer few levels of classes."""
    trees = [tree_of((joint.parent, joint.child) for joint in sketch.joints) for sketch in packing.columns]
    heights = numpy.array([_least_height(tree, len(classes)) for tree in trees])
    costs = heights - heights.min() - _WORTH_OF_RATE
    goal = _RATE_KEPT_OF_SKETCHES * packing.rate
    weights = cheapest_weights(packing, classes.capacities, goal, costs, numpy.zeros((1, len(trees))))
    _, kept = drop_small(weights, packing, classes.capacities, _RATE_KEPT_IN_ALL * packing.rate)
    return [(sketch, share) for sketch, share in zip(packing.columns, kept.tolist(), strict=True) if share > 0]


def best_packing(link_graph: LinkGraph) -> Packing[Routed[EdgeTree]] | Packing[Routed[TreePair]]:
    """The best packing over two or more ranks: of pairs of trees, or of trees used in both directions.

    If all links are symmetric, a pair and its mirror image can be averaged, so that pairs are no better.
    """
    return mirrored_packing(link_graph) if link_graph.symmetric else paired_packing(link_graph)


def mirrored_packing(link_graph: LinkGraph) -> Packing[Routed[EdgeTree]]:
    """The best packing of trees used in both directions, over two or more ranks, with all generated trees."""
    world_size, interfaces = link_graph.world_size, range(link_graph.spec.interface_count)
    pairs = [(i, j) for i in range(world_size) for j in range(i + 1, world_size)]
    keys = [(pair, interface) for interface in interfaces for pair in pairs]
    pair_loads = link_graph.load_rows(([(i, j), (j, i)] for (i, j), _ in keys), [interface for _, interface in keys])
    row = {key: number for number, key in enumerate(keys)}

    def load(columns: Sequence[Routed[EdgeTree]]) -> csc_array:
        edges = numpy.array([row[e, interface] for tree, interface in columns for e in sorted(tree)], dtype=numpy.int64)
        ends = numpy.arange(len(columns) + 1) * (world_size - 1)
        chosen = csr_array((numpy.ones(len(edges)), edges, ends), shape=(len(columns), len(row)))
        return (chosen @ pair_loads).T.tocsc()

    seeds = [(tree, interface) for interface in interfaces for tree in _seeds(link_graph.spec)]
    return generate_columns(link_graph.capacities, seeds, load, _pricing(pair_loads, world_size))


def paired_packing(link_graph: LinkGraph) -> Packing[Routed[TreePair]]:
    """The best packing of pairs of trees with the same root, one for the reduce and one for the broadcast."""
    count, interfaces = link_graph.world_size, range(link_graph.spec.interface_count)
    costs = [arc_costs(link_graph, interface) for interface in interfaces]

    def load(columns: Sequence[Routed[TreePair]]) -> csc_array:
        trees, interfaces = [transfers_of(tree) for tree, _ in columns], [interface for _, interface in columns]
        return link_graph.load_rows(trees, interfaces).T.tocsc()

    def price(duals: Vector) -> Iterator[Routed[TreePair]]:
        for interface in interfaces:
            cost = costs[interface](duals)
            for root in range(count):
                yield (least_arborescence(cost.T, root), least_arborescence(cost, root)), interface

    seeds = [(pair, interface) for interface in interfaces for pair in _pair_seeds(count)]
    return generate_columns(link_graph.capacities, seeds, load, price)


def arc_costs(link_graph: LinkGraph, interface: int = 0) -> Callable[[Vector], Vector]:
    """A function from prices [channels] to the cost [source, target] of the route between each two ranks."""
    count = link_graph.world_size
    between = ~numpy.eye(count, dtype=bool)
    loads = link_graph.load_rows(([(int(i), int(j))] for i, j in numpy.argwhere(between)), repeat(interface))

    def costs(prices: Vector) -> Vector:
        cost = numpy.zeros((count, count))
        cost[between] = loads @ prices
        return cost

    return costs


def transfers_of(pair: TreePair) -> list[tuple[int, int]]:
    """Pairs of source and target rank: up the first tree to its root, then down the second tree."""
    upward, downward = pair
    up = [(rank, parent) for rank, parent in enumerate(upward) if parent >= 0]
    return up + [(parent, rank) for rank, parent in enumerate(downward) if parent >= 0]


def _pair_seeds(count: int) -> Iterator[TreePair]:
    """For every rank as root: a star, and a ring (a chain that ends at the root and one that starts there)."""
    starting_at = list(chains(count))
    for root, star in enumerate(stars(count)):
        hub = root_at(star, root, count)
        yield hub, hub
        ending_here = starting_at[(root + 1) % count]
        yield root_at(ending_here, root, count), root_at(starting_at[root], root, count)


def _seeds(spec: ClusterSpec) -> Iterator[EdgeTree]:
    yield from stars(spec.world_size)
    yield from hierarchical_trees(spec.hierarchy(), spec.world_size)
    yield from chains(spec.world_size)


def _pricing(pair_loads: csr_array, world_size: int) -> Callable[[Vector], Iterator[Routed[EdgeTree]]]:
    """Finds the cheapest trees over each interface; ``pair_loads`` has the rows of one interface after the other."""
    upper = numpy.triu_indices(world_size, k=1)

    def price(duals: Vector) -> Iterator[Routed[EdgeTree]]:
        for interface, costs in enumerate((pair_loads @ duals).reshape(-1, len(upper[0]))):
            cost = numpy.zeros((world_size, world_size))
            cost[upper] = costs
            cost += cost.T
            for start in range(world_size):
                yield least_tree(cost, start), interface

    return price


def _shallow_weights(packing: Packing[Any], capacities: Vector, world_size: int) -> Vector:
    """Weights near the best rate that prefer shallow trees, then a high rate, then an even share of work.

    One level of height outweighs any gain in rate, because shallow trees need less data to fill their pipeline. A
    rank's work is proportional to its number of neighbours in the trees.
    """
    heights = numpy.array([_least_height(tree, world_size) for tree, _ in packing.columns], dtype=float)
    degrees = numpy.zeros((world_size, len(packing.columns)))
    for index, (tree, _) in enumerate(packing.columns):
        paired = isinstance(tree, tuple)
        for edge in transfers_of(tree) if paired else tree:
            degrees[list(edge), index] += 0.5 if paired else 1
    goal = packing.rate * _RATE_KEPT_FOR_SHALLOW
    work = degrees * (_WORTH_OF_WORK / world_size)
    return cheapest_weights(packing, capacities, goal, heights - heights.min() - _WORTH_OF_RATE, work)


def drop_small(
    weights: Vector,
    packing: Packing[Any],
    capacities: Vector,
    goal: float,
    thresholds: Sequence[float] = _SMALLEST_WEIGHTS,
) -> tuple[float, Vector]:
    """The rate and the normalized weights [columns] without the smallest columns of a packing.

    Columns with at most the first of ``thresholds`` as their share are dropped. If the others do not reach the rate
    ``goal``, the next threshold counts; the last threshold is 0.
    """
    shares = weights / weights.sum()
    for smallest in thresholds:
        kept = numpy.where(shares > smallest, shares, 0.0)
        if not kept.any():
            continue
        kept /= kept.sum()
        rate = filling_rate(packing.loads @ kept, capacities)
        if rate >= goal:
            break
    return rate, kept


def filling_rate(loads: Vector, capacities: Vector) -> float:
    """Bytes/s at which the first channel is full, if each byte loads the channels by ``loads``."""
    used = loads > 0
    return float((capacities[used] / loads[used]).min())


def _least_height(tree: EdgeTree | TreePair, world_size: int) -> float:
    """Height from the best root; the mean of both heights of a pair."""
    if isinstance(tree, tuple):
        return (height(tree[0]) + height(tree[1])) / 2
    return height(root_at(tree, centres(tree, world_size)[0], world_size))


def _root_trees(
    columns: Sequence[Routed[EdgeTree] | Routed[TreePair]], weights: Vector, world_size: int
) -> tuple[PackedTree, ...]:
    """Each used tree, rooted at its centre; of two centres, the rank with less weight as a root so far is chosen.

    A pair of trees has a root already. If both trees have the same edges it needs no broadcast tree.
    """
    rooted = numpy.zeros(world_size)
    packed = []
    for index in numpy.argsort(-weights, kind="stable"):
        weight = float(weights[index])
        if weight <= 0:
            break
        tree, interface = columns[index]
        if isinstance(tree, tuple):
            up, down = tree
            packed.append(PackedTree(weight, up, None if up == down else down, interface))
            continue
        root = min(centres(tree, world_size), key=lambda rank: (rooted[rank], rank))
        rooted[root] += weight
        packed.append(PackedTree(weight, root_at(tree, root, world_size), None, interface))
    return tuple(packed)
