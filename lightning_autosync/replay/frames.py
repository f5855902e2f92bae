"""Every piece of every message as a frame of its own: exact, for small schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
from numpy.typing import NDArray

from lightning_autosync.replay.compute import Chores, Compute
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.event_simulation import Graph, Lines, Nodes, move
from lightning_autosync.replay.loads import Loads
from lightning_autosync.replay.network import Floats, Forest, Network
from lightning_autosync.replay.outcome import Outcome, StartOrder
from lightning_autosync.replay.stages import Flow, Stage


def count_frames(stages: Sequence[Stage], ranks: int) -> int:
    """How many frames all ranks send in a step."""
    hops = sum(
        flow.copies * flow.pieces * (ranks - 1) * ((flow.up >= 0) + (flow.down >= 0))
        for stage in stages
        for flow in stage.flows
    )
    return hops + sum(stage.ring_steps * stage.ring_pieces * ranks for stage in stages)


def run_frames(
    stages: Sequence[Stage],
    order: StartOrder,
    loads: Loads,
    computes: Sequence[Compute],
    chores: Chores | None,
    network: Network,
    forest: Forest,
    constants: Constants,
    tokens: Floats,
) -> Outcome:
    """Follow all frames.

    Args:
        stages: of the schedule.
        order: of their starts.
        loads: of the stages: by how much links stretch them, and which channel each fills the longest.
        computes: each rank's own timeline.
        chores: the main threads' work on shared cores.
        network, forest, constants: of the replay.
        tokens: those of `fluid.drain`.
    """
    graph = _Graph(network, forest, constants)
    if chores is not None:
        graph.add_chores(chores)
    for number, stage in enumerate(stages):
        graph.add_stage(number, _stretched(stage, float(loads.stretch[number])), order, computes)
    return graph.run(order, tokens, _fullest(loads.work / network.capacities))


def _fullest(seconds: Floats) -> NDArray[numpy.int64]:
    """[stages] the channel that each keeps busy the longest, -1 for none; ``seconds`` [stages, channels]."""
    return numpy.where(seconds.max(axis=1, initial=0.0) > 0, seconds.argmax(axis=1), -1)


def _stretched(stage: Stage, factor: float) -> Stage:
    """The stage with ``factor`` times its bytes on the wire."""
    flows = tuple(flow._replace(wire=flow.wire * factor) for flow in stage.flows)
    return replace(stage, flows=flows, ring=stage.ring * factor)


@dataclass(frozen=True)
class _Hops:
    """What the frames of one flow have in common.

    Attributes:
        number: of the stage.
        stage: that they belong to.
        wire, values: bytes of a piece, on the wire and in memory.
        frame_cost, delay: seconds of a frame: of a core at either end, and beyond its way.
        offset: of the pairs: what the backend carries has connections of its own.
    """

    number: int
    stage: Stage
    wire: float
    values: float
    frame_cost: float
    delay: float
    offset: int


class _Graph:
    """Frames and points in time, and which must be done before which.

    A node without a pair is a point in time: reached ``after`` seconds after its conditions. One with a pair is a
    frame: sent when its conditions are met and its turn has come, and taken in ``after`` seconds after its arrival.
    """

    def __init__(self, network: Network, forest: Forest, constants: Constants) -> None:
        self._network = network
        self._forest = forest
        self._constants = constants
        self._pair: list[int] = []
        self._size: list[float] = []
        self._key: list[float] = []
        self._cost: list[float] = []
        self._after: list[float] = []
        self._release: list[float] = []
        self._stage: list[int] = []
        self._edges: list[tuple[int, int]] = []
        self._gates: list[int] = []
        self._ends: list[int] = []
        self._first_frames: list[int] = []
        self._chores: list[list[int]] = []

    def add_chores(self, chores: Chores) -> None:
        """The main threads' work, part after part, as frames of one byte that each rank sends to itself."""
        ranks = self._network.ranks
        before: list[int] = []
        for release, core in zip(chores.release, chores.core, strict=True):
            start = self._point(-1, release)
            # A frame costs core-seconds at either end, which are the same rank here.
            part = [
                self._node(-1, 2 * ranks**2 + rank * ranks + rank, 1.0, 0.0, core / 2, 0.0) for rank in range(ranks)
            ]
            self._edges += [(start, node) for node in part]
            self._edges += list(zip(before, part, strict=False))
            self._chores.append(part)
            before = part

    def add_stage(self, number: int, stage: Stage, order: StartOrder, computes: Sequence[Compute]) -> None:
        """The stage's start on every rank, its frames, and its end."""
        deferred, stages = stage.deferred, len(order.release)
        gate = self._point(number, order.release[number] if deferred else 0.0, order.delay[number])
        first, second, part = order.after[number]
        if first >= 0:
            self._edges.append((self._ends[first], gate))
        if second >= 0:
            self._edges.append((self._gates[second], gate))
        chores = self._chores[part - stages] if part >= 0 else []
        if deferred:
            self._edges += [(chore, gate) for chore in chores]
        starts = [
            self._point(number, 0.0 if deferred or first >= 0 else compute.start[stage.message]) for compute in computes
        ]
        self._edges += [(gate, start) for start in starts]
        if not deferred:
            self._edges += list(zip(chores, starts, strict=False))
        self._first_frames.append(len(self._pair))
        arrivals = list(starts)
        for copy in range(max((flow.copies for flow in stage.flows), default=0)):
            for flow in stage.flows:
                if copy < flow.copies:
                    arrivals += self._add_flow(number, stage, flow, starts, float(order.urgency[number]))
        if stage.ring_steps:
            arrivals += self._add_ring(number, stage, starts)
        end = self._point(number)
        self._edges += [(arrival, end) for arrival in arrivals]
        self._gates.append(gate)
        self._ends.append(end)

    def _point(self, stage: int, release: float = 0.0, after: float = 0.0) -> int:
        return self._node(stage, -1, 0.0, 0.0, 0.0, after, release)

    def _node(
        self, stage: int, pair: int, size: float, key: float, cost: float, after: float, release: float = 0.0
    ) -> int:
        self._stage.append(stage)
        self._pair.append(pair)
        self._size.append(size)
        self._key.append(key)
        self._cost.append(cost)
        self._after.append(after)
        self._release.append(release)
        return len(self._pair) - 1

    def _add_flow(self, number: int, stage: Stage, flow: Flow, starts: Sequence[int], urgency: float) -> list[int]:
        """Frames of all pieces; returns the nodes after which all ranks are served."""
        ranks, constants = self._network.ranks, self._constants
        hops = _Hops(
            number,
            stage,
            flow.wire / flow.pieces,
            flow.values / flow.pieces,
            stage.frame_cost(constants),
            stage.hop_delay(constants, ranks),
            ranks * ranks if stage.collective else 0,
        )
        last: list[int] = []
        for piece in range(flow.pieces):
            key = 0.0 if stage.collective else urgency + piece / flow.pieces
            reached: dict[int, int] = {}
            if flow.up >= 0:
                last += self._rise(hops, flow.up, key, starts, reached)
            if flow.down >= 0:
                last += self._come_down(hops, flow.down, key, starts, reached)
        return last

    def _rise(self, hops: _Hops, tree: int, key: float, starts: Sequence[int], reached: dict[int, int]) -> list[int]:
        """A piece from all ranks to the roots, which are ``reached``; returns its nodes."""
        stage, added = hops.stage, []
        parents, order, sizes = self._tree(tree)
        inbound: dict[int, list[int]] = {rank: [starts[rank]] for rank in order}
        for rank in reversed(order):
            if parents[rank] < 0:
                continue
            share = float(stage.growth[sizes[rank]]) if stage.growth is not None else 1.0
            frame = self._frame(hops, rank, parents[rank], key, share, stage.gather + stage.seal)
            self._edges += [(before, frame) for before in inbound[rank]]
            inbound[parents[rank]].append(frame)
            added.append(frame)
        for root in (rank for rank in order if parents[rank] < 0):
            reached[root] = self._point(hops.number)
            self._edges += [(before, reached[root]) for before in inbound[root]]
            added.append(reached[root])
        return added

    def _come_down(
        self, hops: _Hops, tree: int, key: float, starts: Sequence[int], reached: dict[int, int]
    ) -> list[int]:
        """A piece from the roots, which may be ``reached`` by the way up, to all ranks; returns its nodes."""
        stage, added = hops.stage, []
        parents, order, _ = self._tree(tree)
        share = float(stage.growth[self._network.ranks]) if stage.growth is not None else 1.0
        for rank in order:
            if parents[rank] < 0:
                reached.setdefault(rank, starts[rank])
                continue
            frame = self._frame(hops, parents[rank], rank, key, share, stage.open)
            self._edges.append((reached[parents[rank]], frame))
            reached[rank] = frame
            added.append(frame)
        return added

    def _frame(self, hops: _Hops, source: int, target: int, key: float, share: float, coding: float) -> int:
        """A share of a piece from rank to rank; ``coding`` are the seconds a byte of values that follow."""
        size = share * hops.wire
        pair = hops.offset + source * self._network.ranks + target
        cost = size * self._constants.host_cost + hops.frame_cost
        return self._node(hops.number, pair, size, key, cost, hops.delay + share * hops.values * coding)

    def _tree(self, row: int) -> tuple[list[int], list[int], list[int]]:
        forest = self._forest
        return forest.parents[row].tolist(), forest.order[row].tolist(), forest.sizes[row].tolist()

    def _add_ring(self, number: int, stage: Stage, starts: Sequence[int]) -> list[int]:
        """Each rank passes on to its neighbour what it received a step before, in pieces."""
        ranks, constants = self._network.ranks, self._constants
        size = stage.ring / stage.ring_steps / stage.ring_pieces
        handling = stage.hop_delay(constants, ranks)
        cost = size * constants.host_cost + stage.frame_cost(constants)
        before = [[start] * stage.ring_pieces for start in starts]
        last: list[int] = []
        for step in range(stage.ring_steps):
            gather = size * stage.gather if step < stage.ring_steps // 2 else 0.0
            frames = []
            for rank in range(ranks):
                pair = (ranks + rank) * ranks + (rank + stage.ring_way) % ranks
                frames.append(
                    [self._node(number, pair, size, 0.0, cost, handling + gather) for _ in range(stage.ring_pieces)]
                )
                for piece, frame in enumerate(frames[rank]):
                    giver = (rank - stage.ring_way) % ranks if step else rank
                    self._edges.append((before[giver][piece], frame))
                    self._edges.append((starts[rank], frame))
            before = frames
            last = [frame for row in frames for frame in row]
        return last

    def run(self, order: StartOrder, tokens: Floats, bound: NDArray[numpy.int64]) -> Outcome:
        """Simulate; times by stage, ``bound`` as in `Outcome`."""
        network, pairs = self._network, numpy.array(self._pair, dtype=numpy.int64)
        connections, connection = numpy.unique(pairs, return_inverse=True)
        nodes = Nodes(
            numpy.where(pairs < 0, -1, connection),
            numpy.array(self._size),
            numpy.array(self._key),
            numpy.array(self._cost),
            numpy.array(self._after),
            numpy.array(self._release),
        )
        lines = self._lines(connections)
        begun, sent, done = move(nodes, self._graph(order), lines, network.capacities, tokens, network.burst)
        served, drained = self._moving(begun, sent, done)
        return Outcome(
            start=done[self._gates],
            served=served,
            drained=drained,
            end=done[self._ends],
            bound=bound,
            packed=float(done[self._chores[-1]].max()) if self._chores else 0.0,
        )

    def _graph(self, order: StartOrder) -> Graph:
        """Which node waits for which, and for a place in the backend."""
        count = len(self._pair)
        edges = numpy.array(self._edges, dtype=numpy.int64).reshape(-1, 2)
        edges = edges[numpy.argsort(edges[:, 0], kind="stable")]
        queue = numpy.argsort(order.queue, kind="stable")[(order.queue < 0).sum() :]
        return Graph(
            numpy.bincount(edges[:, 1], minlength=count),
            numpy.searchsorted(edges[:, 0], numpy.arange(count + 1)),
            edges[:, 1].copy(),
            numpy.array(self._gates)[queue],
            numpy.array(self._ends)[queue],
            self._constants.collectives,
        )

    def _lines(self, connections: NDArray[numpy.int64]) -> Lines:
        """The connections: the transport's, the backend's, and of each rank to itself, which has no hop."""
        network = self._network
        routes = network.route_of.reshape(-1)[connections % network.ranks**2].astype(numpy.int64)
        routes[connections >= 2 * network.ranks**2] = len(network.latencies)
        return Lines(
            connections % network.ranks**2 // network.ranks,
            connections % network.ranks,
            routes,
            numpy.append(network.starts, network.starts[-1]),
            network.hops,
            numpy.append(network.latencies, 0.0),
            network.links,
            network.shared_core,
        )

    def _moving(self, begun: Floats, sent: Floats, done: Floats) -> tuple[Floats, Floats]:
        """[stages] when the first byte of each moved, and when the last one left; of one without bytes, its end."""
        served, drained = done[self._ends], done[self._ends]
        for number, (first, end) in enumerate(zip(self._first_frames, self._ends, strict=True)):
            started = begun[first:end].min(initial=numpy.inf)
            if numpy.isfinite(started):
                served[number] = started
                drained[number] = sent[first:end][numpy.isfinite(sent[first:end])].max()
        return served, drained
