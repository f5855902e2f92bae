"""Dense messages along trees: pieces are summed on the way up and broadcast on the way down.

Each piece travels by itself. The levels of a tree therefore overlap, several trees are active at once, and the way down
begins before the way up ends. All work runs on the transport's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lightning_autosync.engine.exchanges.base import CodedRange, Completion, Exchange, byte_view, new_residual
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.transport import DOWN, UP, Frame, Peer, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message, Round, TreeTransfer


class TransportSteps:
    """The steps of one message on the transport: the part of a `Receiver` that its exchanges have in common.

    A step is complete when this rank has the sum of every transfer and has sent what others need of it. A subclass
    calls `_progress` for each sum that arrives; `_send` arranges the call for each sum that was sent.

    Args:
        transport: connections to the peers.
        channel: number of this exchange in frames, the same on all ranks.
        message: the message, for its priority and name.
        timeout: seconds to wait for other ranks.
    """

    def __init__(self, transport: Transport, channel: int, message: Message, timeout: float) -> None:
        self._transport = transport
        self._channel = channel
        self._priority = message.priority
        self._name = message.name
        self._step = 0
        self._open = 0
        self.sums_first = False
        self._completion = Completion(f"message '{message.name}'", timeout)
        self._last_steps: dict[int, int] = {}

    def watch(self, completed: Callable[[], None] | None) -> None:
        self._completion.watcher = completed

    def failed(self, error: ExchangeError) -> None:
        self._fail(error)

    def left(self, peer: int, step: int) -> None:
        self._last_steps[peer] = step
        self._fails()

    @property
    def has_come(self) -> bool:
        return self._completion.over

    @property
    def completed(self) -> int:
        return self._step if self._open == 0 else self._step - 1

    def _launch(self, begin: Callable[[], None]) -> None:
        """Begin a step: run ``begin`` on the transport's thread, which does all further work of the step."""
        self._completion.begin()
        self._transport.submit(begin)

    def _enter_step(self, work: int) -> bool:
        """Enter the next step, which ends after ``work`` calls of `_progress`; returns False if it cannot complete."""
        self._step += 1
        self._open = work
        if self._fails():
            return False
        if not work:
            self._completion.done()
        return True

    def _check_step(self, peer: int, frame: Frame, expected: int) -> None:
        if frame.step != expected:
            raise ExchangeError(f"rank {peer} is in step {frame.step} of an exchange, this rank in step {expected}")

    def _send(
        self,
        peer: Peer,
        place: tuple[int, int, int],
        wire: memoryview,
        along: float = 0.0,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue ``wire`` for ``peer``.

        Args:
            peer: a parent or child, the other root, or the other rank of a pair.
            place: transfer, piece and phase.
            wire: bytes to send; they must not change until the step is complete.
            along: position of the piece in its transfer, 0 to 1; pieces with lower positions leave first.
            sent: is called when they have left.
        """
        frame = Frame(self._channel, self._step, *place, len(wire))
        completed = frame.phase if self.sums_first else UP
        urgency = (completed, -self._priority, self._channel, along)
        self._transport.send(peer, frame, wire, urgency, sent)

    def _progress(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._completion.done()

    def _fails(self) -> bool:
        """Whether the step can no longer complete; if so, the waiting thread gets the error."""
        broken = self._transport.error
        early = [peer for peer, last in self._last_steps.items() if last < self._step]
        if broken is None and early:
            last = self._last_steps[early[0]]
            broken = ExchangeError(f"rank {early[0]} has ended after step {last}; this is step {self._step}")
        if broken is not None:
            self._fail(broken)
        return broken is not None

    def _fail(self, error: ExchangeError) -> None:
        self._completion.fail(error)


@dataclass
class _Path:
    """One transfer from this rank's view: its number, and its neighbours on both trees.

    If it has two roots, and this rank is one of them, the other one is its ``partner``, and no neighbour on the trees.
    Only the first of them ``is_root``, so that one rank answers for each sum (see `Exchange.root_ranges`).
    """

    number: int
    is_root: bool
    up_parent: Peer | None
    up_children: tuple[int, ...]
    down_parent: int | None
    down_children: tuple[Peer, ...]
    partner: Peer | None


class _Meeting:
    """A piece at one of its two roots, which exchange what they have summed.

    Attributes:
        partner: the other root.
        step: the step whose sum of the partner is accepted. The partner may be a step ahead.
        came: whether it has arrived.
        inbox: memory for the partner's sum.
        outbox: copy of this rank's sum. The other root's one may be added before it has left.
    """

    __slots__ = ("_received", "_sent", "came", "inbox", "outbox", "partner", "step")

    def __init__(self, partner: Peer, coded: CodedRange) -> None:
        self.partner, self.step, self.came = partner, 1, False
        self._received, self._sent = coded.new_wire(), coded.new_wire()
        self.inbox, self.outbox = byte_view(self._received), byte_view(self._sent)

    def keep(self, coded: CodedRange) -> None:
        """Copy this rank's sum, which is about to be sent."""
        self._sent.copy_(coded.values)

    def unite(self, coded: CodedRange) -> None:
        """Add the partner's sum; then accept that of the next step. Both roots get the same bits: a + b is b + a."""
        coded.add(self._received)
        self.step, self.came = self.step + 1, False


class _Piece:
    """One piece of a transfer.

    Attributes:
        along: position in the transfer, 0 to 1.
        missing: number of children whose contributions have not arrived.
        gathering: the step whose contributions are accepted.
        inboxes: memory for each child's contribution, by rank.
        meeting: the exchange with the other root; None if this rank is not one of two roots.
    """

    __slots__ = (
        "_contributions",
        "along",
        "coded",
        "gathering",
        "inboxes",
        "meeting",
        "missing",
        "number",
        "path",
        "wire",
    )

    def __init__(self, path: _Path, number: int, along: float, coded: CodedRange) -> None:
        self.path, self.number, self.along, self.coded = path, number, along, coded
        self.wire = byte_view(coded.wire)
        self.missing = len(path.up_children)
        self.gathering = 1
        self._contributions = [coded.new_wire() for _ in path.up_children]
        self.inboxes = dict(zip(path.up_children, map(byte_view, self._contributions), strict=True))
        self.meeting = None if path.partner is None else _Meeting(path.partner, coded)

    def meeting_with(self, peer: int) -> _Meeting | None:
        """The exchange with ``peer`` if that is the other root; otherwise None."""
        return self.meeting if self.meeting is not None and peer == self.meeting.partner.rank else None

    def inbox(self, peer: int, phase: int) -> memoryview | None:
        """The memory for bytes from ``peer``; None if the schedule has no such transfer."""
        if phase == UP:
            meeting = self.meeting_with(peer)
            return self.inboxes.get(peer) if meeting is None else meeting.inbox
        return self.wire if peer == self.path.down_parent else None

    def expected_step(self, peer: int, phase: int, step: int) -> int:
        """The step of the bytes that ``peer`` may send next, while this rank is in ``step``."""
        if phase == DOWN:
            return step
        meeting = self.meeting_with(peer)
        return self.gathering if meeting is None else meeting.step

    def reduce(self) -> None:
        """Add the contributions in a fixed order and encode the sum; then accept contributions of the next step."""
        for contribution in self._contributions:
            self.coded.add(contribution)
        self.missing = len(self._contributions)
        self.gathering += 1
        if self.meeting is not None:
            self.meeting.keep(self.coded)
        else:
            self.coded.encode(overwrite=self.path.up_parent is None)


class TreeExchange(TransportSteps, Exchange):
    """One round of a dense message over its trees.

    Args:
        transport: connections to the peers on the trees.
        channel: number of this round in frames, the same on all ranks.
        rank: this rank in the schedule.
        message: the message, for its compressor, priority and name.
        round: the round of the message.
        buffer: CPU tensor [round.length]; summed in place.
        timeout: seconds to wait for other ranks.
    """

    def __init__(
        self,
        transport: Transport,
        channel: int,
        rank: int,
        message: Message,
        round: Round,
        buffer: Tensor,
        timeout: float,
    ) -> None:
        super().__init__(transport, channel, message, timeout)
        self.residual = new_residual(message, buffer)
        transfers = [transfer for transfer in round.transfers if isinstance(transfer, TreeTransfer)]
        # By transfer. Paths do not refer to their pieces: a cycle would keep the buffers until a garbage collection.
        self._pieces: list[list[_Piece]] = []
        self.root_buffer = buffer
        self.root_ranges = [(one.start, one.stop) for one in transfers if one.reduce.parents[rank] < 0]
        tail_start = round.length - message.tail
        for place, transfer in enumerate(transfers):
            path = _new_path(place, transfer, rank)
            self._pieces.append([])
            for number, start in enumerate(range(transfer.start, transfer.stop, transfer.segment)):
                stop = min(start + transfer.segment, transfer.stop)
                coded = CodedRange(buffer, start, stop, tail_start, message.compressor, self.residual)
                along = (start - transfer.start) / (transfer.stop - transfer.start)
                self._pieces[-1].append(_Piece(path, number, along, coded))
        # Pieces at the same position of different trees leave together, so that all trees progress at the same pace.
        pieces = [piece for own in self._pieces for piece in own]
        self._order = sorted(pieces, key=lambda piece: (piece.along, piece.path.number))
        self._work = sum(1 + len(piece.path.down_children) + (piece.meeting is not None) for piece in pieces)
        self._rooted = sum(piece.path.is_root for piece in pieces)
        self._unsummed = 0
        self._summed = Completion(f"message '{message.name}'", timeout)
        transport.register(channel, self)

    def start(self) -> None:
        self._unsummed = self._rooted
        if self._rooted:
            self._summed.begin()
        self._launch(self._begin)

    def wait_at_root(self) -> None:
        if self._rooted:
            self._summed.wait()

    def send_sums_first(self) -> None:
        self.sums_first = True

    def _fail(self, error: ExchangeError) -> None:
        self._summed.fail(error)
        super()._fail(error)

    def wait(self) -> None:
        self._completion.wait()

    def _begin(self) -> None:
        if self._enter_step(self._work):
            for piece in self._order:
                if piece.missing == 0:
                    self._send_up(piece)

    def destination(self, peer: int, frame: Frame) -> memoryview:
        piece = self._piece(peer, frame)
        self._check_step(peer, frame, piece.expected_step(peer, frame.phase, self._step))
        target = piece.inbox(peer, frame.phase)
        if target is None or len(target) != frame.size:
            raise ExchangeError(f"rank {peer} sent a piece of {frame.size} bytes that is not in the schedule")
        return target

    def arrived(self, peer: int, frame: Frame) -> None:
        piece = self._piece(peer, frame)
        if frame.phase == DOWN:
            with profiled(self._name, "broadcast"):
                piece.coded.decode()
                self._send_down(piece)
            return
        if meeting := piece.meeting_with(peer):
            meeting.came = True
            if piece.gathering > meeting.step:
                self._unite(piece, meeting)
            return
        piece.missing -= 1
        # Children that are a step ahead send before this rank has begun the step. `_begin` then sends their sum up.
        if piece.missing == 0 and piece.gathering == self._step:
            self._send_up(piece)

    def _piece(self, peer: int, frame: Frame) -> _Piece:
        try:
            return self._pieces[frame.transfer][frame.piece]
        except IndexError:
            raise ExchangeError(f"rank {peer} sent a piece that is not in the schedule") from None

    def _send_up(self, piece: _Piece) -> None:
        """Sum the contributions of this rank and its children, and send the sum to the parent or the other root."""
        with profiled(self._name, "reduce"):
            piece.reduce()
        path, place = piece.path, (piece.path.number, piece.number, UP)
        if (meeting := piece.meeting) is not None:
            self._send(meeting.partner, place, meeting.outbox, piece.along, self._progress)
            if meeting.came:
                self._unite(piece, meeting)
        elif path.up_parent is None:
            self._start_down(piece)
        else:
            # It has left before its sum can come down, so it needs no callback.
            self._send(path.up_parent, place, piece.wire, piece.along)

    def _unite(self, piece: _Piece, meeting: _Meeting) -> None:
        """Add the other root's sum, and send the sum over all ranks to the children."""
        with profiled(self._name, "reduce"):
            meeting.unite(piece.coded)
        self._start_down(piece)

    def _start_down(self, piece: _Piece) -> None:
        """Send the sum over all ranks, which this root has made, to the children."""
        if piece.path.is_root:
            self._unsummed -= 1
            if self._unsummed == 0:
                self._summed.done()
        with profiled(self._name, "broadcast"):
            self._send_down(piece)

    def _send_down(self, piece: _Piece) -> None:
        """Send the sum over all ranks to the children."""
        path = piece.path
        for child in path.down_children:
            self._send(child, (path.number, piece.number, DOWN), piece.wire, piece.along, self._progress)
        self._progress()


def _new_path(number: int, transfer: TreeTransfer, rank: int) -> _Path:
    up, down, partner = transfer.reduce, transfer.broadcast, transfer.partner(rank)
    return _Path(
        number=number,
        is_root=rank == transfer.root,
        up_parent=Peer(up.parents[rank], up.interface) if up.parents[rank] not in (-1, partner) else None,
        up_children=tuple(child for child in up.children[rank] if child != partner),
        down_parent=down.parents[rank] if down.parents[rank] not in (-1, partner) else None,
        down_children=tuple(Peer(child, down.interface) for child in down.children[rank] if child != partner),
        partner=Peer(partner, up.interface) if partner >= 0 else None,
    )
