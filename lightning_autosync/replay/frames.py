"""Replay with a frame for each piece of each message: the detailed model, for small schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy

from lightning_autosync.plan.pacing import UNSENT_LIMIT
from lightning_autosync.replay.compute import Compute, HostWork
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.event_simulation import Dependencies, FrameConnections, Nodes, simulate
from lightning_autosync.replay.loads import Loads
from lightning_autosync.replay.network import Floats, Forest, Indices, NetworkArrays
from lightning_autosync.replay.notices import NoticeQueue, notice_queues
from lightning_autosync.replay.outcome import StageTimes, StartOrder
from lightning_autosync.replay.paces import Paces, bursts_of
from lightning_autosync.replay.rings import GLOO_WINDOW, WITH_NOTICE
from lightning_autosync.replay.stages import Flow, Stage
from lightning_autosync.replay.windows import Windows, limited_round_trips

_NOTICE = 128.0
"""Bytes of a notice on the wire: 24 bytes of gloo and the headers."""
_WORKED = 1e9
"""Bytes that stand for a core-second of a main thread. It shares cores fairly with connections of as many bytes/s."""


Run = Callable[[Floats, float], tuple[StageTimes, float]]
"""Simulates a step from ``tokens`` as in `fluid.drain`, which it updates in place.

Its second argument are the seconds between the starts of the step before and of this one; 0 for the first. It returns
the times of the stages, and the time in seconds when the main threads have done their synchronization work (0 without
such work).
"""


def count_frames(stages: Sequence[Stage], ranks: int) -> int:
    """Number of frames that all ranks send in a step; at most, if numbers of ranks in pairs are no power of two."""
    hops = sum(
        flow.copies * flow.pieces * (ranks // 2 if flow.turn else ranks - 1) * ((flow.up >= 0) + (flow.down >= 0))
        for stage in stages
        for flow in stage.flows
    )
    return hops + sum(stage.ring_steps * stage.ring_pieces * ranks for stage in stages)


def prepare_frames(
    stages: Sequence[Stage],
    order: StartOrder,
    loads: Loads,
    computes: Sequence[Compute],
    host_work: Sequence[HostWork] | None,
    network: NetworkArrays,
    forest: Forest,
    constants: Constants,
) -> tuple[Run, bool]:
    """Prepare the simulation of all frames of a step.

    Args:
        order: conditions of the stages' starts.
        loads: loads of the stages, for their stretch, their busiest channels and the paces of their connections.
        computes: [ranks] compute timelines.
        host_work: [ranks] the main threads' work on shared cores; None if ranks have cores of their own.
        network, forest, constants: those of the replay.

    Returns:
        A function that simulates a step; see `Run`. Each step finds the congestion windows that the one before left.
        And whether windows may limit any connection.
    """
    graph = _FrameGraph(network, forest, constants)
    if host_work is not None:
        graph.add_host_work(host_work)
    for number, stage in enumerate(stages):
        graph.add_stage(number, _stretched(stage, float(loads.stretch[number])), order, computes)
    paces = Paces.of(stages, loads, forest.trees, network)
    return graph.prepare(order, paces, _fullest(loads.work / network.capacities))


def _fullest(seconds: Floats) -> Indices:
    """[stages] channel that each stage keeps busy the longest, -1 for none; ``seconds`` is [stages, channels]."""
    return numpy.where(seconds.max(axis=1, initial=0.0) > 0, seconds.argmax(axis=1), -1)


def _stretched(stage: Stage, factor: float) -> Stage:
    """The stage with ``factor`` times its bytes on the wire."""
    flows = tuple(flow._replace(wire=flow.wire * factor) for flow in stage.flows)
    return replace(stage, flows=flows, ring=stage.ring * factor)


class _Pieces(NamedTuple):
    """Properties shared by all frames of a flow.

    Attributes:
        wire, values: bytes of a piece on the wire and in memory.
        frame_cost: core-seconds of a frame at each end.
        delay: seconds of a hop beyond one latency and its time on the wire.
        offset: added to the number of a pair of ranks, because the backend has connections of its own.
    """

    stage: Stage
    wire: float
    values: float
    frame_cost: float
    delay: float
    offset: int


class _FrameGraph:
    """Dependency graph of frames and points in time.

    A node without a pair is a point in time, reached ``after`` seconds after its conditions are met. A node with a pair
    is a frame. It is sent when its conditions are met and it is its turn, and done ``after`` seconds after its arrival.
    """

    def __init__(self, network: NetworkArrays, forest: Forest, constants: Constants) -> None:
        self._network = network
        self._forest = forest
        self._constants = constants
        self._nodes: list[tuple[int, float, float, float, float, float]] = []
        self._edges: list[tuple[int, int]] = []
        self._gates: list[int] = []
        self._ends: list[int] = []
        self._first_frames: list[int] = []
        self._notices: list[int] = []
        self._host_work: list[list[int]] = []
        self._notice_queues: dict[int, list[list[NoticeQueue]]] = {}

    def add_host_work(self, host_work: Sequence[HostWork]) -> None:
        """Add the main threads' work [ranks], part after part, as frames that each rank sends to itself."""
        ranks = self._network.ranks
        alone = self._network.pairs + ranks**2  # after the transport's and the backend's connections
        before: list[int] = []
        for number in range(len(host_work[0].core)):
            starts = [self._point(work.release[number]) for work in host_work]
            # A frame has its cost at both ends, and here both ends are the same rank: hence half of it.
            part = [
                self._node(
                    alone + rank * ranks + rank, 1.0 + _WORKED * work.core[number], 0.0, work.core[number] / 2, 0.0
                )
                for rank, work in enumerate(host_work)
            ]
            self._edges += list(zip(starts, part, strict=True))
            self._edges += list(zip(before, part, strict=False))
            self._host_work.append(part)
            before = part

    def add_stage(self, number: int, stage: Stage, order: StartOrder, computes: Sequence[Compute]) -> None:
        """Add the stage's start on each rank, its frames and its end."""
        deferred, stages = stage.deferred, len(order.release)
        gate = self._point(order.release[number] if deferred else 0.0, order.delay[number])
        first, second, part = order.after[number]
        if first >= 0:
            self._edges.append((self._ends[first], gate))
        if second >= 0:
            self._edges.append((self._gates[second], gate))
        before = self._host_work[part - stages] if part >= 0 else []
        if deferred:
            self._edges += [(node, gate) for node in before]
        starts = [self._point(0.0 if deferred or first >= 0 else compute.start[stage.message]) for compute in computes]
        self._edges += [(gate, start) for start in starts]
        if not deferred:
            self._edges += list(zip(before, starts, strict=False))
        self._first_frames.append(len(self._nodes))
        arrivals = starts + self._add_flows(stage, starts, float(order.urgency[number]))
        if stage.ring_steps:
            arrivals += self._add_ring(stage, starts)
        end = self._point()
        self._edges += [(arrival, end) for arrival in arrivals]
        self._gates.append(gate)
        self._ends.append(end)

    def _point(self, release: float = 0.0, after: float = 0.0) -> int:
        return self._node(-1, 0.0, 0.0, 0.0, after, release)

    def _node(self, pair: int, size: float, key: float, cost: float, after: float, release: float = 0.0) -> int:
        """Add a node with the fields of `Nodes`, where ``pair`` stands for the connection; returns its index."""
        self._nodes.append((pair, size, key, cost, after, release))
        return len(self._nodes) - 1

    def _add_flows(self, stage: Stage, starts: Sequence[int], urgency: float) -> list[int]:
        """Add the frames of all flows; returns their nodes."""
        added: list[int] = []
        for copy in range(max((flow.copies for flow in stage.flows), default=0)):
            for flow in (one for one in stage.flows if copy < one.copies):
                if flow.turn == 1:
                    ready = [list(starts) for _ in range(flow.pieces)]
                if flow.turn:
                    added += self._add_exchange(stage, flow, ready, urgency)
                else:
                    added += self._add_flow(stage, flow, starts, urgency)
        return added

    def _add_flow(self, stage: Stage, flow: Flow, starts: Sequence[int], urgency: float) -> list[int]:
        """Add the frames of all pieces; returns their nodes."""
        pieces = self._pieces(stage, flow)
        last: list[int] = []
        for piece in range(flow.pieces):
            key = 0.0 if stage.collective else urgency + piece / flow.pieces
            reached: dict[int, int] = {}
            if flow.up >= 0:
                last += self._rise(pieces, flow, key, starts, reached)
            if flow.down >= 0:
                last += self._come_down(pieces, flow.down, key, starts, reached)
        return last

    def _add_exchange(self, stage: Stage, flow: Flow, ready: Sequence[list[int]], urgency: float) -> list[int]:
        """Add the frames of all pieces between pairs of ranks; returns the nodes after them.

        ``ready`` [pieces, ranks] has the nodes after which each rank sends, and then those after the exchange.
        """
        pieces, added = self._pieces(stage, flow), []
        parents, _, _, first = self._tree(max(flow.up, flow.down))
        coding = stage.meet if flow.mutual else stage.gather
        for number, nodes in enumerate(ready):
            before, key = list(nodes), urgency + number / flow.pieces
            for rank, parent in enumerate(parents):
                for sender, target, way in ((rank, parent, flow.up), (parent, rank, flow.down)):
                    if parent >= 0 and way >= 0:
                        frame = self._frame(pieces, first + sender, target, key, 1.0, coding)
                        nodes[target] = after = self._point()
                        self._edges += [(before[sender], frame), (frame, after), (before[target], after)]
                        added.append(after)
        return added

    def _pieces(self, stage: Stage, flow: Flow) -> _Pieces:
        return _Pieces(
            stage,
            flow.wire / flow.pieces,
            flow.values / flow.pieces,
            stage.frame_cost(self._constants),
            stage.hop_delay(self._constants, self._network.ranks),
            self._network.pairs if stage.collective else 0,
        )

    def _rise(
        self, pieces: _Pieces, flow: Flow, key: float, starts: Sequence[int], reached: dict[int, int]
    ) -> list[int]:
        """Add a piece's way from all ranks up to the roots, which it enters in ``reached``; returns its nodes."""
        stage, added = pieces.stage, []
        parents, order, sizes, first = self._tree(flow.up)
        inbound: dict[int, list[int]] = {rank: [starts[rank]] for rank in order}
        roots = [rank for rank in order if parents[rank] < 0 or rank == flow.second]
        for rank in reversed(order):
            if rank in roots:
                continue
            share = float(stage.growth[sizes[rank]]) if stage.growth is not None else 1.0
            frame = self._frame(pieces, first + rank, parents[rank], key, share, stage.gather + stage.seal)
            self._edges += [(before, frame) for before in inbound[rank]]
            self._add_notice_before(frame, stage, rank, parents[rank], starts)
            inbound[parents[rank]].append(frame)
            added.append(frame)
        if flow.second >= 0:
            sums = {root: list(inbound[root]) for root in roots}
            for sender, target in (roots, reversed(roots)):
                frame = self._frame(pieces, first + sender, target, key, 1.0, stage.meet)
                self._edges += [(before, frame) for before in sums[sender]]
                inbound[target].append(frame)
                added.append(frame)
        for root in roots:
            reached[root] = self._point()
            self._edges += [(before, reached[root]) for before in inbound[root]]
            added.append(reached[root])
        return added

    def _come_down(
        self, pieces: _Pieces, tree: int, key: float, starts: Sequence[int], reached: dict[int, int]
    ) -> list[int]:
        """Add a piece's way from the roots down to all ranks; returns its nodes.

        ``reached`` has the nodes after which roots have the sum, if the piece went up before.
        """
        stage, added = pieces.stage, []
        parents, order, _, first = self._tree(tree)
        share = float(stage.growth[self._network.ranks]) if stage.growth is not None else 1.0
        for rank in order:
            if parents[rank] < 0:
                reached.setdefault(rank, starts[rank])
            if rank in reached:  # it is a root
                continue
            frame = self._frame(pieces, first + parents[rank], rank, key, share, stage.open)
            self._edges.append((reached[parents[rank]], frame))
            self._add_notice_before(frame, stage, parents[rank], rank, starts)
            reached[rank] = frame
            added.append(frame)
        return added

    def _frame(self, pieces: _Pieces, row: int, target: int, key: float, share: float, coding: float) -> int:
        """Add a frame with a share of a piece.

        ``row`` is the sender's in `Routes.between`, ``coding`` the work on arrival in seconds per byte of values.
        """
        size = share * pieces.wire
        pair = pieces.offset + row * self._network.ranks + target
        cost = size * self._constants.host_cost + pieces.frame_cost
        return self._node(pair, size, key, cost, pieces.delay + share * pieces.values * coding)

    def _add_notice_before(self, frame: int, stage: Stage, sender: int, target: int, starts: Sequence[int]) -> None:
        """Let a frame from ``sender`` to ``target`` wait for the target's notice, if the stage's frames need notices.

        A notice has the connection of the target's own data to the sender, and waits behind such data.
        """
        if stage.latencies == WITH_NOTICE:
            back = self._network.pairs + target * self._network.ranks + sender
            notice = self._node(back, _NOTICE, 0.0, 0.0, 0.0)
            self._notices.append(notice)
            self._edges += [(starts[target], notice), (notice, frame)]

    def _latency(self, sender: int, target: int) -> float:
        """Seconds of the route of the backend's connection from ``sender`` to ``target``."""
        routes = self._network.routes
        return float(routes.latencies[routes.between[sender, target]])

    def _tree(self, tree: int) -> tuple[list[int], list[int], list[int], int]:
        """The fields of a tree in `Trees`."""
        parents, order, sizes, first = (field[tree].tolist() for field in self._forest.trees)
        return parents, order, sizes, first

    def _add_ring(self, stage: Stage, starts: Sequence[int]) -> list[int]:
        """Add a ring: each rank sends its neighbour, in pieces, the data that it received a step before."""
        ranks, constants = self._network.ranks, self._constants
        size = stage.ring / stage.ring_steps / stage.ring_pieces
        handling = stage.hop_delay(constants, ranks)
        cost = size * constants.host_cost + stage.frame_cost(constants)
        queues = self._queues(stage.ring_way, size)
        before: list[list[int]] = [[] for _ in starts]
        for step in range(stage.ring_steps):
            gather = size * stage.gather if step < stage.ring_steps // 2 else 0.0
            frames = []
            for rank, start in enumerate(starts):
                target, giver = (rank + stage.ring_way) % ranks, (rank - stage.ring_way) % ranks
                after = handling + gather + self._latency(rank, target)
                own = cost - stage.frame_cost(constants) / 2 if queues[rank] and step else cost
                pair = self._network.pairs + rank * ranks + target
                frames.append([self._node(pair, size, 0.0, own, after) for _ in range(stage.ring_pieces)])
                self._edges += [(begun, frame) for frame in frames[rank] for begun in (start, starts[target])]
                self._edges += list(zip(before[giver], frames[rank], strict=False))
                sent = [*before[rank][-GLOO_WINDOW:], *frames[rank]]
                for place, frame in enumerate(sent[GLOO_WINDOW:]):
                    ready = self._add_notice(stage, rank, sent[place], queues[rank]) if step else sent[place]
                    self._edges.append((ready, frame))
            before = frames
        return [frame for row in before for frame in row]

    def _queues(self, way: int, piece: float) -> list[list[int]]:
        """For each rank, those behind whose data the notice waits that lets it send a piece of so many bytes."""
        if way not in self._notice_queues:
            self._notice_queues[way] = notice_queues(self._network, way)
        return [[queue.sender for queue in queues if piece <= queue.max_piece] for queues in self._notice_queues[way]]

    def _add_notice(self, stage: Stage, rank: int, received: int, queue: Sequence[int]) -> int:
        """Add the notice that lets ``rank`` send another piece once one is ``received``; returns its last node.

        It waits behind the data of the ranks in ``queue``, and takes half of what a piece costs the hosts.
        """
        if not queue:
            return received
        ranks = self._network.ranks
        backend = self._network.pairs
        handled = backend + ranks**2 + (rank + stage.ring_way) % ranks * ranks + rank
        last = self._node(handled, 1.0, 0.0, stage.frame_cost(self._constants) / 2, 0.0)
        for sender in queue:
            beyond = (sender + stage.ring_way) % ranks
            # It leaves the queue as that rank's data does, but travels elsewhere: so without the latency of that route.
            latency = self._latency(sender, beyond)
            behind = self._node(backend + sender * ranks + beyond, _NOTICE, 0.0, 0.0, -latency)
            self._edges += [(received, behind), (behind, last)]
        return last

    def prepare(self, order: StartOrder, paces: Paces, bound: Indices) -> tuple[Run, bool]:
        """Prepare the simulation of the graph; returns what `prepare_frames` does."""
        network = self._network
        columns = zip(*self._nodes, strict=True)
        pairs = numpy.array(next(columns), dtype=numpy.int64)
        used = numpy.unique(pairs[pairs >= 0])
        connection = numpy.where(pairs < 0, -1, numpy.searchsorted(used, pairs))
        nodes = Nodes(connection, *(numpy.array(column) for column in columns))
        dependencies, connections = self._dependencies(order), self._connections(used, paces)
        windows = Windows.new(len(used))

        def run(tokens: Floats, passed: float) -> tuple[StageTimes, float]:
            windows.pass_by(passed)
            begun, sent, done = simulate(
                nodes, dependencies, connections, windows, network.capacities, tokens, network.burst
            )
            moved, drained = self._moving(begun, sent, done)
            packed = float(done[self._host_work[-1]].max()) if self._host_work else 0.0
            return StageTimes(done[self._gates], moved, drained, done[self._ends], bound), packed

        return run, bool(connections.round_trip.any())

    def _dependencies(self, order: StartOrder) -> Dependencies:
        """The dependencies of the nodes on each other and on places in the backend."""
        count = len(self._nodes)
        edges = numpy.array(self._edges, dtype=numpy.int64).reshape(-1, 2)
        edges = edges[numpy.argsort(edges[:, 0], kind="stable")]
        queue = numpy.argsort(order.queue, kind="stable")[(order.queue < 0).sum() :]
        return Dependencies(
            numpy.bincount(edges[:, 1], minlength=count),
            numpy.searchsorted(edges[:, 0], numpy.arange(count + 1)),
            edges[:, 1].copy(),
            numpy.array(self._gates)[queue],
            numpy.array(self._ends)[queue],
            self._constants.collectives,
        )

    def _connections(self, pairs: Indices, paces: Paces) -> FrameConnections:
        """The connections: the transport's, the backend's, and each rank's connection to itself, which has no hops."""
        network, known = self._network, self._network.routes
        ways = numpy.where(pairs < network.pairs, pairs, (pairs - network.pairs) % network.ranks**2)
        routes = known.between.reshape(-1)[ways].astype(numpy.int64)
        routes[pairs >= network.pairs + network.ranks**2] = len(known.latencies)
        # The backend's connections have larger numbers, and no pace.
        limits, bursts = numpy.full(len(pairs), numpy.inf), numpy.full(len(pairs), numpy.inf)
        paced = numpy.searchsorted(pairs, paces.pairs)
        limits[paced], bursts[paced] = paces.rates, bursts_of(paces.rates, known.latencies[routes[paced]])
        unsent = numpy.full(len(pairs), float(UNSENT_LIMIT))
        # Notices and the backend's data have connections of their own, of which the transport's limits say nothing.
        used = numpy.searchsorted(pairs, paces.used)
        unsent[used] = paces.held
        latencies = numpy.append(known.latencies, 0.0)
        restarts = self._constants.restarts
        return FrameConnections(
            ways // network.ranks % network.ranks,
            ways % network.ranks,
            routes,
            limits,
            bursts,
            known._replace(starts=numpy.append(known.starts, known.starts[-1]), latencies=latencies),
            unsent,
            limited_round_trips(latencies[routes]) if restarts else numpy.zeros(len(routes)),
            network.links,
            network.shared_core,
        )

    def _moving(self, begun: Floats, sent: Floats, done: Floats) -> tuple[Floats, Floats]:
        """[stages] times when a stage's first byte moved and its last byte left; its end if it has no bytes.

        Notices are no bytes of a stage.
        """
        moved, drained = done[self._ends], done[self._ends]
        begun, sent = begun.copy(), sent.copy()
        begun[self._notices], sent[self._notices] = numpy.inf, numpy.inf
        for number, (first, end) in enumerate(zip(self._first_frames, self._ends, strict=True)):
            started = begun[first:end].min(initial=numpy.inf)
            if numpy.isfinite(started):
                moved[number] = started
                drained[number] = sent[first:end][numpy.isfinite(sent[first:end])].max()
        return moved, drained
