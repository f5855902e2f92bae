"""Every piece of every message as a frame of its own: exact, for small schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy

from lightning_autosync.simulator.compute import Chores, Compute
from lightning_autosync.simulator.constants import Constants
from lightning_autosync.simulator.forest import Forest
from lightning_autosync.simulator.network import Floats, Network
from lightning_autosync.simulator.order import StartOrder
from lightning_autosync.simulator.outcome import Outcome
from lightning_autosync.simulator.packets import Graph, Lines, Nodes, move
from lightning_autosync.simulator.stages import Flow, Stage


def count_frames(stages: Sequence[Stage], ranks: int) -> int:
    """How many frames all ranks send in a step."""
    hops = sum(
        flow.pieces * (ranks - 1) * ((flow.up >= 0) + (flow.down >= 0)) for stage in stages for flow in stage.flows
    )
    return hops + sum(stage.ring_steps * stage.ring_pieces * ranks for stage in stages)


def run_frames(
    stages: Sequence[Stage],
    order: StartOrder,
    stretch: Floats,
    computes: Sequence[Compute],
    chores: Chores | None,
    network: Network,
    forest: Forest,
    constants: Constants,
    tokens: Floats,
) -> Outcome:
    """Follow all frames; ``stretch`` [stages] is that of `Loads`, ``computes`` each rank's own timeline, ``chores`` the
    main threads' work on shared cores, and ``tokens`` those of `fluid.drain`."""
    graph = _Graph(network, forest, constants)
    if chores is not None:
        graph.add_chores(chores)
    for number, stage in enumerate(stages):
        graph.add_stage(number, _stretched(stage, float(stretch[number])), order, computes)
    return graph.run(order, tokens)


def _stretched(stage: Stage, factor: float) -> Stage:
    """The stage with ``factor`` times its bytes on the wire."""
    flows = tuple(flow._replace(wire=flow.wire * factor) for flow in stage.flows)
    return replace(stage, flows=flows, ring=stage.ring * factor)


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
        for flow in stage.flows:
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
        frame_cost = stage.handling + (constants.message_cost if stage.collective else constants.frame_cost)
        handling = constants.hop_delay(stage.collective, ranks) + constants.crowd(ranks) * stage.handling
        offset = ranks * ranks if stage.collective else 0
        last: list[int] = []
        wire, values = flow.wire / flow.pieces, flow.values / flow.pieces
        for piece in range(flow.pieces):
            key = 0.0 if stage.collective else urgency + piece / flow.pieces
            reached: dict[int, int] = {}
            if flow.up >= 0:
                parents, order, sizes = self._tree(flow.up)
                inbound: dict[int, list[int]] = {rank: [starts[rank]] for rank in order}
                for rank in reversed(order):
                    if parents[rank] < 0:
                        continue
                    share = stage.growth[sizes[rank]] if stage.growth is not None else 1.0
                    frame = self._node(
                        number,
                        offset + rank * ranks + parents[rank],
                        share * wire,
                        key,
                        share * wire * constants.host_cost + frame_cost,
                        handling + share * values * (stage.gather + stage.seal),
                    )
                    self._edges += [(before, frame) for before in inbound[rank]]
                    inbound[parents[rank]].append(frame)
                    last.append(frame)
                for root in (rank for rank in order if parents[rank] < 0):
                    reached[root] = self._point(number)
                    self._edges += [(before, reached[root]) for before in inbound[root]]
                    last.append(reached[root])
            if flow.down >= 0:
                parents, order, _ = self._tree(flow.down)
                share = stage.growth[ranks] if stage.growth is not None else 1.0
                for rank in order:
                    if parents[rank] < 0:
                        reached.setdefault(rank, starts[rank])
                        continue
                    frame = self._node(
                        number,
                        offset + parents[rank] * ranks + rank,
                        share * wire,
                        key,
                        share * wire * constants.host_cost + frame_cost,
                        handling + share * values * stage.open,
                    )
                    self._edges.append((reached[parents[rank]], frame))
                    reached[rank] = frame
                    last.append(frame)
        return last

    def _tree(self, row: int) -> tuple[list[int], list[int], list[int]]:
        forest = self._forest
        return forest.parents[row].tolist(), forest.order[row].tolist(), forest.sizes[row].tolist()

    def _add_ring(self, number: int, stage: Stage, starts: Sequence[int]) -> list[int]:
        """Each rank passes on to the next what it received a step before, in pieces."""
        ranks, constants = self._network.ranks, self._constants
        size = stage.ring / stage.ring_steps / stage.ring_pieces
        handling = constants.hop_delay(True, ranks)
        cost = size * constants.host_cost + constants.message_cost
        before = [[start] * stage.ring_pieces for start in starts]
        last: list[int] = []
        for step in range(stage.ring_steps):
            gather = size * stage.gather if step < stage.ring_steps // 2 else 0.0
            frames = []
            for rank in range(ranks):
                pair = (ranks + rank) * ranks + (rank + 1) % ranks
                frames.append(
                    [self._node(number, pair, size, 0.0, cost, handling + gather) for _ in range(stage.ring_pieces)]
                )
                for piece, frame in enumerate(frames[rank]):
                    self._edges.append((before[rank - 1 if step else rank][piece], frame))
                    self._edges.append((starts[rank], frame))
            before = frames
            last = [frame for row in frames for frame in row]
        return last

    def run(self, order: StartOrder, tokens: Floats) -> Outcome:
        """Simulate; times by stage."""
        network, count = self._network, len(self._pair)
        pairs = numpy.array(self._pair, dtype=numpy.int64)
        connections, connection = numpy.unique(pairs, return_inverse=True)
        routes = network.route_of.reshape(-1)[connections % network.ranks**2].astype(numpy.int64)
        routes[connections >= 2 * network.ranks**2] = len(network.latencies)  # from a rank to itself: no hop
        edges = numpy.array(self._edges, dtype=numpy.int64).reshape(-1, 2)
        edges = edges[numpy.argsort(edges[:, 0], kind="stable")]
        queue = numpy.argsort(order.queue, kind="stable")[(order.queue < 0).sum() :]
        begun, sent, done = move(
            Nodes(
                numpy.where(pairs < 0, -1, connection),
                numpy.array(self._size),
                numpy.array(self._key),
                numpy.array(self._cost),
                numpy.array(self._after),
                numpy.array(self._release),
            ),
            Graph(
                numpy.bincount(edges[:, 1], minlength=count),
                numpy.searchsorted(edges[:, 0], numpy.arange(count + 1)),
                edges[:, 1].copy(),
                numpy.array(self._gates)[queue],
                numpy.array(self._ends)[queue],
                self._constants.collectives,
            ),
            Lines(
                connections % network.ranks**2 // network.ranks,
                connections % network.ranks,
                routes,
                numpy.append(network.starts, network.starts[-1]),
                network.hops,
                numpy.append(network.latencies, 0.0),
                network.links,
                network.shared_core,
            ),
            network.capacities,
            tokens,
            network.burst,
        )
        edges_of = [*self._first_frames, count]
        served, drained = [], []
        for number, (first, end) in enumerate(zip(self._first_frames, self._ends, strict=True)):
            served.append(float(begun[first:end].min(initial=numpy.inf)))
            moving = sent[first:end][numpy.isfinite(sent[first:end])]
            drained.append(float(moving.max(initial=-numpy.inf)))
            if edges_of[number] == end or not numpy.isfinite(served[-1]):
                served[-1] = drained[-1] = float(done[end])
        return Outcome(
            start=done[self._gates],
            served=numpy.array(served),
            drained=numpy.array(drained),
            end=done[self._ends],
            bound=numpy.full(len(self._ends), -1, dtype=numpy.int64),
            packed=float(done[self._chores[-1]].max()) if self._chores else 0.0,
        )
