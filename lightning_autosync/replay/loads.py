"""The load of each stage on every channel, and the time in which its pipeline fills and drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.replay.compiled import compiled
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.network import Flags, Floats, Forest, Indices, NetworkArrays, Routes, Trees
from lightning_autosync.replay.pipelines import Flows, Paths, load
from lightning_autosync.replay.rings import WITH_NOTICE, ring_waiting
from lightning_autosync.replay.stages import Stage

_RIVALRY = 0.85
"""Share of common connections and similarity of loads above which two stages run one after the other."""
_SHARPNESS = 8
"""Exponent of the smooth test for full channels in `_fullness`."""


@dataclass(frozen=True)
class Loads:
    """Loads of stages.

    Attributes:
        work: [stages, channels] bytes on links, core-seconds on hosts.
        stretch: [stages] factor by which sharing slows a stage down on links; ``work`` includes it.
        fill: [stages] seconds in which a stage runs without keeping its busiest channel busy.
        waiting: [stages] seconds in which a ring waits between its pieces, while others can use its channels.
        pairs: [stages, words] bit set of the connections of a stage on trees, by their numbers in `NetworkArrays`.
    """

    work: Floats
    stretch: Floats
    fill: Floats
    waiting: Floats
    pairs: NDArray[numpy.uint64]
    flows: Flows

    def rivals(self) -> NDArray[numpy.bool_]:
        """[stages, stages] whether two stages on trees use nearly the same connections to nearly the same degree.

        On a connection the more urgent stage goes first. Stages on different connections share the links instead of
        waiting for each other.
        """
        return _overlap(self.pairs, self.work)


def flow_arrays(stages: Sequence[Stage], ranks: int, constants: Constants) -> Flows:
    """The flows of all stages."""
    flows = [flow for stage in stages for flow in stage.flows]
    up, down, wire, values, pieces, copies, second, turn = zip(*flows, strict=True) if flows else ((),) * 8
    costs = numpy.zeros((len(stages), 7))
    growth = numpy.ones((len(stages), ranks + 1))
    for number, stage in enumerate(stages):
        frame, hop = stage.frame_cost(constants), stage.hop_delay(constants, ranks)
        costs[number] = stage.gather, stage.seal, stage.open, frame, hop, stage.latencies, stage.meet
        if stage.growth is not None:
            growth[number] = stage.growth
    return Flows(
        numpy.repeat(numpy.arange(len(stages)), [len(stage.flows) for stage in stages]),
        numpy.array(up, dtype=numpy.int64),
        numpy.array(down, dtype=numpy.int64),
        numpy.array(wire, dtype=float),
        numpy.array(values, dtype=float),
        numpy.array(pieces, dtype=numpy.int64),
        numpy.array(copies, dtype=numpy.int64),
        numpy.array(second, dtype=numpy.int64),
        numpy.array(turn, dtype=numpy.int64),
        costs,
        growth,
        constants.host_cost,
    )


class _Ring(NamedTuple):
    """A ring, in which every rank sends to a neighbour in rank order. An arc is the route between two neighbours.

    Attributes:
        arcs: [channels] number of arcs that cross each channel.
        latency: seconds; the largest latency of an arc.
        crowding: the largest number of full channels on one arc that several arcs share.
    """

    arcs: Floats
    latency: float
    crowding: float

    @classmethod
    def of(cls, network: NetworkArrays, way: int) -> _Ring:
        """The ring in direction ``way``, as in `Stage.ring_way`."""
        arcs = numpy.zeros(len(network.capacities))
        if network.ranks == 1:
            return cls(arcs, 0.0, 0.0)
        ranks = numpy.arange(network.ranks)
        neighbours = (ranks + way) % network.ranks
        network.find_routes(numpy.sort(ranks * network.ranks + neighbours))
        known = network.routes
        routes = known.between[ranks, neighbours]
        crossed = [known.hops[known.starts[route] : known.starts[route + 1]] for route in routes]
        for hops in crossed:
            arcs[hops] += 1
        counts = arcs[: network.links]
        full = _fullness((counts / network.capacities[: network.links])[None])[0] * (counts > 1)
        return cls(arcs, float(known.latencies[routes].max()), max(float(full[hops].sum()) for hops in crossed))


class LoadModel:
    """Turns stages into loads on one network."""

    def __init__(self, network: NetworkArrays, forest: Forest, constants: Constants) -> None:
        self._network = network
        self._forest = forest
        self._constants = constants
        self._rings: dict[int, _Ring] = {}

    def loads(self, stages: Sequence[Stage]) -> Loads:
        """The loads of stages, each as if it ran alone."""
        network, constants = self._network, self._constants
        self._forest.settle()
        flows = flow_arrays(stages, network.ranks, constants)
        together = numpy.zeros(network.ranks, dtype=numpy.int64)
        whole = numpy.zeros(len(stages), dtype=numpy.bool_)
        work, fill, pairs = (each[0] for each in self._by_class(flows, together, whole, self._paths()))
        crowding, waiting = numpy.zeros(len(stages)), numpy.zeros(len(stages))
        if len(flows.stage):
            shared = _connections(pairs, network.routes, network.links) > 1
            full = shared * _fullness(work[:, : network.links] / network.capacities[: network.links])
            _crowd(flows, self._forest.trees, network.routes, full, crowding)
        for number, stage in enumerate(stages):
            if stage.ring_steps:
                ring = self._ring(stage.ring_way)
                crowding[number] = ring.crowding
                self._add_ring(stage, ring, work[number])
                # The last piece comes when all data has left; waits before that leave the channels to others.
                last = WITH_NOTICE * ring.latency
                fill[number] += last
                waiting[number] = self._ring_waiting(stage, ring, flows.costs[number, 4]) - last
        stretch = 1 + constants.sharing_loss * numpy.maximum(crowding - 1, 0)
        work[:, : network.links] *= stretch[:, None]
        return Loads(work, stretch, fill, waiting, pairs, flows)

    def by_class(
        self, loads: Loads, classes: Indices, parted: Flags, pairs: Indices, paces: Floats
    ) -> tuple[Floats, Floats]:
        """The loads of ``parted`` stages, divided by the slowest rank for which a hop waits.

        Args:
            classes: [ranks] class of each rank, 0 for the slowest.
            parted: [stages] whether a stage is divided; others have no load in the result.
            pairs: [connections] numbers of the paced connections.
            paces: [connections] their bytes/s.

        Returns:
            [classes, stages, channels + connections] ``work`` and [classes, stages] ``fill``, as in `Loads`.
        """
        chosen = parted[loads.flows.stage]
        # The first nine fields have a value for each flow.
        flows = Flows._make([*(each[chosen] for each in loads.flows[:9]), *loads.flows[9:]])
        work, fill, _ = self._by_class(flows, classes, parted, self._paths(pairs, paces))
        work[..., : self._network.links] *= loads.stretch[:, None]
        work[..., len(self._network.capacities) :] *= loads.stretch[:, None]
        return work, fill

    def _by_class(
        self, flows: Flows, classes: Indices, parted: Flags, paths: Paths
    ) -> tuple[Floats, Floats, NDArray[numpy.uint64]]:
        shape = int(classes.max()) + 1, len(flows.costs)
        work, fill = numpy.zeros((*shape, len(paths.capacities))), numpy.zeros(shape)
        pairs = numpy.zeros((*shape, (self._network.pairs + 63) // 64), dtype=numpy.uint64)
        if len(flows.stage):
            load(flows, paths, classes, parted, work, fill, pairs)
        return work, fill, pairs

    def _paths(self, pairs: Sequence[int] | Indices = (), paces: Sequence[float] | Floats = ()) -> Paths:
        """The trees and routes; connections with a pace are channels after those of the network."""
        network = self._network
        paced = numpy.full(network.pairs, -1, dtype=numpy.int64)
        paced[numpy.array(pairs, dtype=numpy.int64)] = len(network.capacities) + numpy.arange(len(pairs))
        capacities = numpy.concatenate([network.capacities, paces])
        return Paths(self._forest.trees, network.routes, capacities, network.links, network.shared_core, paced)

    def _ring(self, way: int) -> _Ring:
        if way not in self._rings:
            self._rings[way] = _Ring.of(self._network, way)
        return self._rings[way]

    def _ring_waiting(self, stage: Stage, ring: _Ring, hop_delay: float) -> float:
        """Seconds in which a ring waits for its latencies and its hosts."""
        sent = stage.ring * float((ring.arcs / self._network.capacities).max())
        waiting = ring_waiting(stage.ring_steps * stage.ring_pieces, sent, ring.latency)
        return waiting + stage.ring_steps * hop_delay * min(stage.ring_pieces, 2)

    def _add_ring(self, stage: Stage, ring: _Ring, work: Floats) -> None:
        network, constants = self._network, self._constants
        work += stage.ring * ring.arcs
        handled = 2 * stage.ring_steps * stage.ring_pieces * stage.frame_cost(constants)
        seconds = 2 * stage.ring * constants.host_cost + stage.ring / 2 * stage.gather + handled
        work[network.links : network.links + network.ranks] += seconds
        if network.shared_core >= 0:
            work[network.shared_core] += network.ranks * seconds


def _fullness(times: Floats) -> Floats:
    """[stages, links] 1 for the links that are busy the longest, near 0 for links with spare capacity."""
    longest: Floats = numpy.maximum(times.max(axis=1, keepdims=True), 1e-300)
    fullness: Floats = (times / longest) ** _SHARPNESS
    return fullness


@compiled
def _overlap(pairs: NDArray[numpy.uint64], work: Floats) -> NDArray[numpy.bool_]:
    stages, words = pairs.shape
    own = numpy.zeros(stages, dtype=numpy.int64)
    rivals = numpy.zeros((stages, stages), dtype=numpy.bool_)
    for stage in range(stages):
        for word in range(words):
            own[stage] += _ones(pairs[stage, word])
    for one in range(stages):
        for other in range(one):
            common = 0
            for word in range(words):
                both = pairs[one, word] & pairs[other, word]
                if both:
                    common += _ones(both)
            if common > _RIVALRY * max(own[one], own[other], 1):
                alike = _likeness(work[one] / work[one].sum(), work[other] / work[other].sum())
                rivals[one, other] = rivals[other, one] = alike > _RIVALRY
    return rivals


@compiled
def _likeness(one: Floats, other: Floats) -> float:
    """Weighted Jaccard index of two distributions over channels: 1 if they are equal, 0 if they are disjoint."""
    return float(numpy.minimum(one, other).sum() / numpy.maximum(one, other).sum())


@compiled
def _ones(word: numpy.uint64) -> int:
    """Number of bits that are set."""
    bits = 0
    while word:
        # Clears the lowest bit that is set. All operands are uint64: numba converts a mix with int64 to float64.
        word &= word - numpy.uint64(1)
        bits += 1
    return bits


@compiled
def _connections(pairs: NDArray[numpy.uint64], routes: Routes, links: int) -> Indices:
    """[stages, links] number of a stage's connections that cross each link."""
    between, starts, hops, _ = routes
    ranks = between.shape[1]
    counts = numpy.zeros((len(pairs), links), dtype=numpy.int64)
    for stage in range(len(pairs)):
        for pair in range(between.size):
            if pairs[stage, pair >> 6] >> numpy.uint64(pair & 63) & numpy.uint64(1):
                route = between[pair // ranks, pair % ranks]
                for hop in range(starts[route], starts[route + 1]):
                    counts[stage, hops[hop]] += 1
    return counts


@compiled
def _crowd(flows: Flows, trees: Trees, routes: Routes, fullness: Floats, crowding: Floats) -> None:
    """Fill in ``crowding`` [stages]: the largest number of full channels on a hop of each stage.

    ``fullness`` [stages, links] is that of `_fullness`.
    """
    between, starts, hops, _ = routes
    ranks = trees.parents.shape[1]
    for flow in range(len(flows.stage)):
        stage = flows.stage[flow]
        for way in range(2):
            tree = flows.up[flow] if way == 0 else flows.down[flow]
            if tree < 0:
                continue
            first = trees.first[tree]
            for rank in range(ranks):
                parent = trees.parents[tree, rank]
                if parent >= 0:
                    route = between[first + rank, parent] if way == 0 else between[first + parent, rank]
                    full = 0.0
                    for hop in range(starts[route], starts[route + 1]):
                        full += fullness[stage, hops[hop]]
                    crowding[stage] = max(crowding[stage], full)
