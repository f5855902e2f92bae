"""Packing spanning trees into a cluster: the trees of the ``packed`` topology and how much travels on each.

The program is that of fractional tree packing (Edmonds 1973; used for collectives by Blink, MLSys 2020).
Each tree carries its share of the data up to its root and, mirrored, back down, so a tree edge {i, j} loads
the routes i to j and j to i once each and the root does not matter. A tree of least cost under channel
prices is then a minimum spanning tree.

Reducing and broadcasting along the same tree is optimal where all links are symmetric. Where they are not, a
pair of different trees can be faster, and the rate here may be below
:func:`lightning_autosync.cluster.bounds.synchronization_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from lightning_autosync.cluster.column_generation import Packing, cheapest_weights, generate_columns
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.cluster.topology import Topology
from lightning_autosync.cluster.trees import (
    Parents,
    Tree,
    centres,
    chains,
    height,
    hierarchical_trees,
    least_tree,
    root_at,
    stars,
)

_RATE_KEPT_FOR_SHALLOW = 0.99
_WORTH_OF_RATE = 0.5  # in levels of height
_WORTH_OF_WORK = 0.1  # below the worth of rate for any tree, as no rank has world_size neighbours
_RATE_KEPT_IN_ALL = 0.98
_SMALLEST_WEIGHTS = (0.005, 0.001, 0.0)


@dataclass(frozen=True)
class PackedTree:
    """One tree of a packing.

    Attributes:
        weight: the share of the data that travels on it; all weights sum to 1.
        parents: the parent of each rank, -1 at the root.
    """

    weight: float
    parents: Parents


@dataclass(frozen=True)
class TreePacking:
    """Trees that together synchronize ``rate`` bytes/s (infinite for one rank), heaviest first."""

    rate: float
    trees: tuple[PackedTree, ...]


@lru_cache(maxsize=64)
def pack_trees(spec: ClusterSpec) -> TreePacking:
    """Few and shallow trees that reach at least 98% of the best rate of any mirrored packing.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    topology = Topology(spec)
    capacities = topology.capacities
    if spec.world_size == 1:
        return TreePacking(math.inf, (PackedTree(1.0, (-1,)),))
    packing = mirrored_packing(topology)
    weights = _shallow_weights(packing, capacities, spec.world_size)
    rate, weights = _drop_small(weights, packing, capacities)
    return TreePacking(rate, _root_trees(packing.columns, weights, spec.world_size))


def mirrored_packing(topology: Topology) -> Packing[Tree]:
    """The best packing of trees used both ways, over two ranks or more, with all trees met on the way."""
    world_size = topology.world_size
    pairs = [(i, j) for i in range(world_size) for j in range(i + 1, world_size)]
    pair_loads = topology.load_rows([(i, j), (j, i)] for i, j in pairs)
    row = {pair: index for index, pair in enumerate(pairs)}

    def load(trees: Sequence[Tree]) -> csc_array:
        edges = numpy.array([row[edge] for tree in trees for edge in sorted(tree)], dtype=numpy.int64)
        ends = numpy.arange(len(trees) + 1) * (world_size - 1)
        chosen = csr_array((numpy.ones(len(edges)), edges, ends), shape=(len(trees), len(pairs)))
        return (chosen @ pair_loads).T.tocsc()

    return generate_columns(topology.capacities, _seeds(topology.spec), load, _pricing(pair_loads, world_size))


def _seeds(spec: ClusterSpec) -> Iterator[Tree]:
    yield from stars(spec.world_size)
    yield from hierarchical_trees(spec.hierarchy(), spec.world_size)
    yield from chains(spec.world_size)


def _pricing(pair_loads: csr_array, world_size: int) -> Callable[[NDArray[numpy.float64]], Iterator[Tree]]:
    upper = numpy.triu_indices(world_size, k=1)

    def price(duals: NDArray[numpy.float64]) -> Iterator[Tree]:
        cost = numpy.zeros((world_size, world_size))
        cost[upper] = pair_loads @ duals
        cost += cost.T
        return (least_tree(cost, start) for start in range(world_size))

    return price


def _shallow_weights(
    packing: Packing[Tree], capacities: NDArray[numpy.float64], world_size: int
) -> NDArray[numpy.float64]:
    """Weights near the best rate that favour low trees, then rate, then an even share of work.

    A level of height outweighs any gain in rate, since low trees need less data to fill their pipeline. A
    rank works in proportion to its neighbours in the trees.
    """
    heights = numpy.array([_least_height(tree, world_size) for tree in packing.columns], dtype=float)
    degrees = numpy.zeros((world_size, len(packing.columns)))
    for index, tree in enumerate(packing.columns):
        for edge in tree:
            degrees[list(edge), index] += 1
    goal = packing.rate * _RATE_KEPT_FOR_SHALLOW
    work = degrees * (_WORTH_OF_WORK / world_size)
    return cheapest_weights(packing, capacities, goal, heights - heights.min() - _WORTH_OF_RATE, work)


def _drop_small(
    weights: NDArray[numpy.float64], packing: Packing[Tree], capacities: NDArray[numpy.float64]
) -> tuple[float, NDArray[numpy.float64]]:
    """Rate and normalized weights without the smallest trees, dropping fewer where that costs too much."""
    shares = weights / weights.sum()
    for smallest in _SMALLEST_WEIGHTS:
        kept = numpy.where(shares > smallest, shares, 0.0)
        if not kept.any():
            continue
        kept /= kept.sum()
        rate = _rate(packing.loads @ kept, capacities)
        if rate >= _RATE_KEPT_IN_ALL * packing.rate:
            break
    return rate, kept


def _rate(loads: NDArray[numpy.float64], capacities: NDArray[numpy.float64]) -> float:
    """Bytes/s at which the fullest channel is full, where each byte loads the channels by ``loads``."""
    used = loads > 0
    return float((capacities[used] / loads[used]).min())


def _least_height(tree: Tree, world_size: int) -> int:
    return height(root_at(tree, centres(tree, world_size)[0], world_size))


def _root_trees(trees: tuple[Tree, ...], weights: NDArray[numpy.float64], world_size: int) -> tuple[PackedTree, ...]:
    """Each used tree hung from its centre; of two centres, from the rank that roots less so far."""
    rooted = numpy.zeros(world_size)
    packed = []
    for index in numpy.argsort(-weights, kind="stable"):
        weight = float(weights[index])
        if weight <= 0:
            break
        root = min(centres(trees[index], world_size), key=lambda rank: (rooted[rank], rank))
        rooted[root] += weight
        packed.append(PackedTree(weight, root_at(trees[index], root, world_size)))
    return tuple(packed)
