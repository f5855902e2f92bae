"""The communication of each message of a Schedule, as stages that follow each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy

from lightning_autosync.plan import codecs
from lightning_autosync.plan.messages import ITEMSIZE
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    Round,
    RowBroadcast,
    TreeTransfer,
    TwoLevelAllReduce,
    index_bytes,
    used_broadcasts,
)
from lightning_autosync.plan.trees import Tree
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.network import NOTHING, Floats, Forest
from lightning_autosync.replay.rings import WITH_NOTICE, ring_pieces
from lightning_autosync.workload import Workload

ONWARDS, BACKWARDS = 1, -1
"""Directions of a ring: each rank sends to the next rank or to the previous one."""


class Flow(NamedTuple):
    """A range of elements that is reduced up one tree and broadcast down another, or an exchange between pairs.

    Attributes:
        up, down: indices of the trees in `Forest`; `NOTHING` if it does not travel in that direction.
        wire: bytes of the range on the wire, encoded and framed.
        values: bytes of the range in the memory of a rank; 0 if it adds nothing.
        pieces: number of pieces into which the range is cut.
        copies: number of ranges of this length on these trees.
        second: the second root of the trees, as in `TreeTransfer`; `NOTHING` if they have one root.
        turn: number of an exchange between each rank and its parent, who send at the same time, from 1; 0 for trees. An
            exchange follows the flow before it, piece by piece and rank by rank.
    """

    up: int
    down: int
    wire: float
    values: float
    pieces: int
    copies: int = 1
    second: int = NOTHING
    turn: int = 0

    @property
    def mutual(self) -> bool:
        """Whether pairs of ranks send to each other."""
        return self.turn > 0 and self.up >= 0 and self.down >= 0


@dataclass
class Stage:
    """One communication phase of a message.

    Attributes:
        message: index of the message.
        collective: whether the backend carries the stage; it runs a few collectives at once, in launch order.
        deferred: whether the stage is launched only after the backward pass and after the message's previous stage.
        beside: whether the stage runs beside the message's previous stage instead of after it.
        launch: core-seconds of each rank's main thread before the start; for a deferred stage elapsed seconds, since
            all ranks launch it at once.
        finish: seconds of each rank's main thread after its wait for the stage.
        flows: ranges that travel along trees.
        ring: total framed bytes that each rank sends to its neighbour in rank order.
        ring_way: direction of the ring: `BACKWARDS` as in gloo's all-reduce, or `ONWARDS` as in its all-gather.
        ring_steps: number of sequential hops of the ring.
        ring_pieces: number of pieces that each rank sends in a ring step.
        latencies: number of one-way latencies of a hop on trees; a hop of a ring, which is gloo's, always has two.
        growth: [ranks + 1] share of a range that the sum over k ranks fills, only for rows; 1 if nothing is summed.
        row_trees: for each transfer of rows, its trees up and down, as in `Flow`; also where few rows leave it unused.
            For exchanges between pairs, those of each exchange.
        gather, seal, open: core-seconds per byte of values to add a contribution, to encode, and to decode the sum.
        meet: core-seconds per byte of values of each of two roots, or of a pair: it copies its own sum if that would
            change before it has left, and adds the other one.
        handling: core-seconds per frame at each end, on top of the cost of every frame.
    """

    message: int
    collective: bool
    deferred: bool = False
    beside: bool = False
    launch: float = 0.0
    finish: float = 0.0
    flows: tuple[Flow, ...] = ()
    ring: float = 0.0
    ring_way: int = BACKWARDS
    ring_steps: int = 0
    ring_pieces: int = 2
    latencies: int = 1
    growth: Floats | None = None
    row_trees: tuple[tuple[tuple[int, int], ...], ...] = ()
    gather: float = 0.0
    seal: float = 0.0
    open: float = 0.0
    meet: float = 0.0
    handling: float = 0.0

    def frame_cost(self, constants: Constants) -> float:
        """Core-seconds per frame at each end, without the cost of its bytes."""
        return self.handling + (constants.message_cost if self.collective else constants.frame_cost)

    def hop_delay(self, constants: Constants, ranks: int) -> float:
        """Seconds that a hop takes beyond its latencies and its time on the wire, without the cost of its bytes."""
        return constants.hop_delay(self.collective, ranks) + constants.crowd(ranks) * self.handling


class StageMaker:
    """Makes the stages of messages for one workload on one cluster."""

    def __init__(self, workload: Workload, forest: Forest, constants: Constants) -> None:
        self._workload = workload
        self._forest = forest
        self._constants = constants
        self._ranks = forest.ranks
        self._crowd = constants.crowd(forest.ranks)

    def stages(self, message: Message) -> list[Stage]:
        """The stages of a message, first to last."""
        if message.rows:
            return self._rows(message)
        rounds = [self._round(message, round) for round in message.rounds]
        if len(rounds) > 1:
            self._add_factors(message, *rounds)
        rounds[-1][-1].finish += self._crowd * self._unpacking(message)
        return [stage for stages in rounds for stage in stages]

    def _round(self, message: Message, round: Round) -> list[Stage]:
        if isinstance(round.transfers[0], AllToAll) if round.transfers else False:
            return self._all_to_all(message, round)
        if isinstance(round.transfers[0], TwoLevelAllReduce) if round.transfers else False:
            return self._two_levels(message, round)
        if message.in_shared_memory:
            return [self._shared_memory(message, round)]
        if isinstance(round.transfers[0], PairwiseReduce) if round.transfers else False:
            return [self._exchanges(message, round)]
        return self._all_reduces(message, round) if message.collective else [self._trees(message, round)]

    def _add_factors(self, message: Message, first: Sequence[Stage], second: Sequence[Stage]) -> None:
        """Add the cost of PowerSGD: a matrix product before each of the two rounds, and one after both."""
        size = message.numel * ITEMSIZE[message.dtype]
        encode = size * self._constants.encode.seconds_per_byte("powersgd")
        first[0].launch += encode
        second[0].launch += self._crowd * encode
        for stage in second:
            stage.deferred = stage.deferred or stage is second[0] or stage.beside
        second[-1].finish += self._crowd * size * self._constants.decode.seconds_per_byte("powersgd")

    def _unpacking(self, message: Message) -> float:
        """Core-seconds in which a main thread takes a message's sum and copies the means into the gradients."""
        constants = self._constants
        copying = message.numel * ITEMSIZE[message.dtype] / constants.copy_rate
        return constants.finish_cost + len(message.variables) * constants.unpack_cost + copying

    def _coding(self, message: Message) -> tuple[float, float]:
        """Core-seconds per byte of values to encode and to decode."""
        codec = codecs.find(message.compressor.kind)
        kind = "none" if codec.sums == "plain" else codec.encoded_as
        return self._constants.encode.seconds_per_byte(kind), self._constants.decode.seconds_per_byte(kind)

    def _wire(self, message: Message, start: int, stop: int, end: int) -> float:
        """Framed bytes of elements ``[start, stop)`` of a round that ends at ``end``."""
        tail = min(stop - start, max(0, stop - (end - message.tail)))
        return self._framed(message, stop - start, tail)

    def _framed(self, message: Message, span: int, tail: int) -> float:
        """Framed bytes of ``span`` elements, of which the last ``tail`` are counts."""
        return self._constants.framing * codecs.encoded_bytes(message.compressor, span, tail, ITEMSIZE[message.dtype])

    def _trees(self, message: Message, round: Round) -> Stage:
        itemsize = ITEMSIZE[message.dtype]
        flows = [
            Flow(
                self._row(transfer.reduce),
                self._row(transfer.broadcast),
                self._framed(message, span, tail),
                span * itemsize,
                -(-span // transfer.segment),
                copies,
                transfer.second_root,
            )
            for transfer, span, tail, copies in _alike(round, round.length - message.tail)
        ]
        encode, decode = self._coding(message)
        gather = decode + 1 / self._constants.reduce_rate
        return Stage(
            message.index,
            False,
            launch=self._constants.exchange_cost,
            flows=tuple(flows),
            gather=gather,
            seal=encode,
            open=decode,
            meet=gather + 1 / self._constants.copy_rate,
        )

    def _exchanges(self, message: Message, round: Round) -> Stage:
        """Exchanges between pairs of ranks."""
        constants, itemsize = self._constants, ITEMSIZE[message.dtype]
        transfers = [one for one in round.transfers if isinstance(one, PairwiseReduce)]
        flows = []
        for transfer, copies in Counter(replace(one, start=0, stop=one.stop - one.start) for one in transfers).items():
            size, pieces = transfer.stop * itemsize, -(-transfer.stop // transfer.segment)
            for turn, swap in enumerate(transfer.swaps, 1):
                row, sent = self._forest.row(swap.parents), size * swap.share
                ways = row if swap.rises else NOTHING, row if swap.falls else NOTHING
                flows.append(Flow(*ways, constants.framing * sent, sent * swap.adds, pieces, copies, turn=turn))
        gather = 1 / constants.reduce_rate
        return Stage(
            message.index,
            False,
            launch=constants.exchange_cost,
            flows=tuple(flows),
            row_trees=tuple(((flow.up, flow.down),) for flow in flows),
            gather=gather,
            meet=gather if transfers[0].halves else gather + 1 / constants.copy_rate,
        )

    def _row(self, tree: Tree) -> int:
        return self._forest.row(tree.parents, tree.interface)

    def _all_reduces(self, message: Message, round: Round) -> list[Stage]:
        """A stage for each of the backend's threads that take part: transfers go to the threads in turn."""
        transfers = [transfer for transfer in round.transfers if isinstance(transfer, AllReduce)]
        threads = max(1, min(len(transfers), self._constants.collectives))
        stages = [self._rings(message, round, transfers[thread::threads]) for thread in range(threads)]
        for stage in stages[1:]:
            stage.beside = True
        values = round.length * ITEMSIZE[message.dtype]
        encode, decode = self._coding(message)
        stages[0].launch += values * encode
        stages[0].finish += self._crowd * values * decode
        return stages

    def _rings(self, message: Message, round: Round, transfers: Sequence[AllReduce]) -> Stage:
        """gloo's ring all-reduces, one after the other, as one ring.

        Each goes from every rank to the previous one, in 2 (n - 1) steps with 1/n of the range each.
        """
        constants, ranks = self._constants, self._ranks
        wire = sum(self._wire(message, transfer.start, transfer.stop, round.length) for transfer in transfers)
        values = sum(transfer.stop - transfer.start for transfer in transfers) * ITEMSIZE[message.dtype]
        steps = 2 * (ranks - 1)
        part = wire / max(1, len(transfers)) / ranks
        return Stage(
            message.index,
            True,
            launch=len(transfers) * constants.collective_cost,
            ring=steps * wire / ranks,
            ring_steps=steps * len(transfers),
            ring_pieces=ring_pieces(part),
            gather=values / max(wire, 1.0) / constants.reduce_rate,
        )

    def _shared_memory(self, message: Message, round: Round) -> Stage:
        """After the backward pass every rank sums an equal part of all buffers and writes the sum into each buffer."""
        constants, others = self._constants, self._ranks - 1
        part = round.length * ITEMSIZE[message.dtype] / self._ranks
        summing = others * part * (1 / constants.reduce_rate + 1 / constants.copy_rate)
        handing_over = 2 * others * constants.message_cost
        return Stage(
            message.index, False, deferred=True, finish=constants.crowd(self._ranks) * (summing + handing_over)
        )

    def _all_to_all(self, message: Message, round: Round) -> list[Stage]:
        """Contributions go to the owners of ranges at once; sums return after the backward pass."""
        (transfer,) = round.transfers
        assert isinstance(transfer, AllToAll)
        itemsize = ITEMSIZE[message.dtype]
        wires, values = numpy.zeros(self._ranks), numpy.zeros(self._ranks)
        for owner, start, stop in zip(transfer.owners, transfer.bounds, transfer.bounds[1:], strict=False):
            wires[owner] += self._wire(message, start, stop, round.length)
            values[owner] += (stop - start) * itemsize
        owners = [owner for owner in range(self._ranks) if wires[owner]]
        star = self._forest.star
        there = tuple(Flow(star(o), NOTHING, float(wires[o]), float(values[o]), 1) for o in owners)
        back = tuple(Flow(NOTHING, star(o), float(wires[o]), float(values[o]), 1) for o in owners)
        encode, decode = self._coding(message)
        pack = 1 / self._constants.copy_rate + encode
        add = decode + 1 / self._constants.reduce_rate
        most, every = float(values.max()), float(values.sum())
        # The owner adds the contributions, then writes the sum once for each rank.
        summing = most * ((self._ranks - 1) * add + self._ranks / self._constants.copy_rate + encode)
        unpack = every * (1 / self._constants.copy_rate + decode)
        # Every pair of ranks exchanges a message in each direction, even an empty one.
        launch = self._constants.collective_cost + 2 * (self._ranks - 1) * self._constants.pair_cost
        before, between = launch + every * pack, self._crowd * (launch + summing)
        return [
            Stage(message.index, True, launch=before, flows=there, latencies=WITH_NOTICE),
            Stage(
                message.index,
                True,
                deferred=True,
                launch=between,
                finish=self._crowd * unpack,
                flows=back,
                latencies=WITH_NOTICE,
            ),
        ]

    def _two_levels(self, message: Message, round: Round) -> list[Stage]:
        """A two-level all-reduce: rings inside the places, then among ranks with the same seat, then inside again.

        Each level waits for the one before. The rings are NCCL's and are assumed to go onwards. Shard ``k`` of a ring
        is summed along the chain that ends at member ``k``, and broadcast along the chain that starts there. Equal
        rings run side by side, as one forest of chains.
        """
        first = round.transfers[0]
        assert isinstance(first, TwoLevelAllReduce)
        places = first.places
        rails = list(zip(*places, strict=True))
        wire = self._wire(message, 0, round.length, round.length)
        values = float(round.length * ITEMSIZE[message.dtype])
        seats = len(rails)
        towards = [self._chains(places, seat, onwards=False) for seat in range(seats)]
        onwards = [self._chains(places, seat, onwards=True) for seat in range(seats)]
        scatter = tuple(Flow(tree, NOTHING, wire / seats, values / seats, seats) for tree in towards)
        gather = tuple(Flow(NOTHING, tree, wire / seats, values / seats, seats) for tree in onwards)
        shards = seats * len(places)
        between = tuple(
            Flow(
                self._chains(rails, place, onwards=False),
                self._chains(rails, place, onwards=True),
                wire / shards,
                values / shards,
                1,
            )
            for place in range(len(places))
        )
        reduce = 1 / self._constants.reduce_rate
        return [
            Stage(message.index, True, launch=3 * self._constants.collective_cost, flows=scatter, gather=reduce),
            Stage(message.index, True, flows=between, gather=reduce),
            Stage(message.index, True, flows=gather),
        ]

    def _chains(self, rings: Sequence[Sequence[int]], end: int, onwards: bool) -> int:
        """The index of a forest with one chain around each ring: towards member ``end``, or ``onwards`` from it."""
        parents = [-1] * self._ranks
        for ring in rings:
            way = [ring[(end + step) % len(ring)] for step in range(len(ring))]
            for place in range(1, len(way)):
                parents[way[place]] = way[place - 1] if onwards else way[(place + 1) % len(way)]
        return self._forest.row(tuple(parents))

    def _rows(self, message: Message) -> list[Stage]:
        """Touched rows: trees merge them on the way up, or every rank gathers the rows of all ranks."""
        width = message.numel // message.rows
        touched = self._workload.variable(message.variables[0]).rows
        touched = float(message.rows) if touched is None else touched
        size = touched * (index_bytes(message.rows) + width * ITEMSIZE[message.dtype])
        if message.collective:
            return self._native_rows(message, size, touched)
        if isinstance(message.rounds[0].transfers[0], RowBroadcast):
            return [self._gathered_rows(message, size, touched)]
        return [self._merged_rows(message, size, touched)]

    def _native_rows(self, message: Message, size: float, touched: float) -> list[Stage]:
        """The backend's all-gathers: of the numbers of rows, then of ``size`` bytes of rows from each rank."""
        constants, ranks = self._constants, self._ranks
        launch = constants.collective_cost + constants.merge_cost
        sizes = (ranks - 1) * 8.0
        counts = Stage(message.index, True, launch=launch, ring=sizes, ring_way=ONWARDS, ring_steps=ranks - 1)
        gathering = Stage(
            message.index,
            True,
            deferred=True,
            launch=self._crowd * (constants.collective_cost + size / constants.copy_rate),
            ring=(ranks - 1) * size * constants.framing,
            ring_way=ONWARDS,
            ring_steps=ranks - 1,
            finish=self._adding(size) + self._writing(message, size, touched),
        )
        return [counts, gathering]

    def _adding(self, size: float) -> float:
        """Seconds in which each rank adds up the rows of all ranks, ``size`` bytes from each."""
        merge = self._constants.encode.seconds_per_byte("rows")
        return self._crowd * self._ranks * (size * merge + self._constants.merge_cost)

    def _writing(self, message: Message, size: float, touched: float) -> float:
        """Seconds in which each rank writes the rows that any rank touched into its gradient.

        A sparse gradient takes the sum as it is.
        """
        if message.sparse:
            return 0.0
        union = size * self._growth(message, touched)[-1] * message.rows / max(touched, 1e-9)
        return self._crowd * float(union) * self._constants.decode.seconds_per_byte("rows")

    def _growth(self, message: Message, touched: float) -> Floats:
        """[ranks + 1] share of a table that the sum over k ranks fills, each with ``touched`` rows.

        Ranks touch rows independently, so some coincide: the sum fills 1 - (1 - p)^k of the table.
        """
        growth: Floats = 1 - (1 - touched / message.rows) ** numpy.arange(self._ranks + 1, dtype=numpy.float64)
        return growth

    def _gathered_rows(self, message: Message, size: float, touched: float) -> Stage:
        """A broadcast of ``size`` bytes from each rank; the rank's main thread packs its rows and adds up all rows."""
        constants, width = self._constants, message.numel // message.rows
        flows = []
        transfers = [one for one in message.rounds[0].transfers if isinstance(one, RowBroadcast)]
        assert len(transfers) == len(message.rounds[0].transfers)
        for transfer, share in used_broadcasts(transfers, size):
            pieces = max(1, round_up(share * touched / max(1, transfer.segment // width)))
            wire = share * size * constants.framing
            for tree in transfer.trees:
                flows.append(Flow(NOTHING, self._row(tree), wire, share * size, pieces))
        return Stage(
            message.index,
            False,
            launch=constants.exchange_cost + constants.merge_cost + size / constants.copy_rate,
            flows=tuple(flows),
            growth=numpy.ones(self._ranks + 1),
            row_trees=tuple(tuple((NOTHING, self._row(tree)) for tree in one.trees) for one in transfers),
            handling=constants.merge_cost / 2,  # a rank unpacks each set, but packs its own only once
            finish=self._adding(size) + self._writing(message, size, touched),
        )

    def _merged_rows(self, message: Message, size: float, touched: float) -> Stage:
        """Rows along trees, merged on the way up: ``size`` bytes of ``touched`` rows from each rank."""
        constants = self._constants
        whole = size * message.rows / max(touched, 1e-9)
        flows = []
        for transfer in message.rounds[0].transfers:
            assert isinstance(transfer, TreeTransfer)
            part = (transfer.stop - transfer.start) / message.numel * whole
            trees = self._row(transfer.reduce), self._row(transfer.broadcast)
            flows.append(Flow(*trees, part * constants.framing, part, 1))
        return Stage(
            message.index,
            False,
            launch=constants.exchange_cost,
            flows=tuple(flows),
            growth=self._growth(message, touched),
            row_trees=tuple(((flow.up, flow.down),) for flow in flows),
            gather=constants.encode.seconds_per_byte("rows"),
            handling=constants.merge_cost,
            finish=self._writing(message, size, touched) + self._crowd * constants.merge_cost,
        )


def _alike(round: Round, counts: int) -> list[tuple[TreeTransfer, int, int, int]]:
    """Groups of equal transfers on the same trees: a transfer, its length, its elements beyond ``counts``, its count.

    Trees are compared by identity, which is fast: a plan has many transfers but few tree objects.
    """
    first: dict[tuple[int, ...], TreeTransfer] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for transfer in round.transfers:
        assert isinstance(transfer, TreeTransfer)
        stop = transfer.stop
        span = stop - transfer.start
        tail = 0 if stop <= counts else min(span, stop - counts)
        key = span, tail, transfer.segment, id(transfer.reduce), id(transfer.broadcast), transfer.second_root
        if key in numbers:
            numbers[key] += 1
        else:
            numbers[key], first[key] = 1, transfer
    return [(first[key], key[0], key[1], number) for key, number in numbers.items()]


def round_up(value: float) -> int:
    """The smallest integer not below ``value``."""
    return int(-(-value // 1))
