"""Dense messages by exchanges between pairs of ranks; see `PairwiseReduce`.

Each piece travels by itself. All work runs on the transport's thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_autosync.engine.exchanges.base import Exchange, byte_view
from lightning_autosync.engine.exchanges.trees import TransportSteps
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.transport import UP, Frame, Peer, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.pairwise import PairwiseReduce, Turn
from lightning_autosync.plan.schedule import Message, Round


class _Meeting:
    """An exchange of a piece with another rank.

    What this rank adds has an inbox of its own, because it may come before this rank is there. A part of the sum over
    all ranks comes into the buffer at once: the other rank has it only if this rank's contribution to it has left.

    Attributes:
        turn: what this rank sends and receives.
        inbox: memory for the other rank's bytes.
        step: the step whose bytes are accepted. The other rank may be a step ahead.
        came: whether they have arrived.
    """

    __slots__ = ("_copy", "_outbox", "_received", "_sent", "_sum", "came", "inbox", "step", "turn")

    def __init__(self, turn: Turn, buffer: Tensor) -> None:
        self.turn, self.step, self.came = turn, 1, False
        self._sent, self._sum = buffer[slice(*turn.sends or (0, 0))], buffer[slice(*turn.receives or (0, 0))]
        # Zeros make the system provide the memory now. The sum may change before a whole one has left.
        self._copy = torch.zeros_like(self._sent) if turn.adds and turn.sends == turn.receives else None
        self._received = torch.zeros_like(self._sum) if turn.adds else self._sum
        self.inbox, self._outbox = (
            byte_view(self._received),
            byte_view(self._sent if self._copy is None else self._copy),
        )

    def send(self) -> memoryview:
        """The bytes to send, which do not change until they have left."""
        if self._copy is not None:
            self._copy.copy_(self._sent)
        return self._outbox

    def take(self) -> None:
        """Add what has come; then accept that of the next step. Both ranks get the same bits: a + b is b + a."""
        if self.turn.adds:
            self._sum.add_(self._received)
        self.step, self.came = self.step + 1, False


class _Piece:
    """One piece of a transfer.

    Attributes:
        number: its number among the pieces of all transfers, the same on all ranks.
        along: position in the transfer, 0 to 1.
        meetings: its exchanges, first to last.
        further: those that have not begun in this step.
        current: the one whose bytes this rank waits for; None if there is none.
    """

    __slots__ = ("along", "current", "further", "meetings", "number")

    def __init__(self, number: int, along: float, meetings: list[_Meeting]) -> None:
        self.number, self.along, self.meetings = number, along, meetings
        self.further: Iterator[_Meeting] = iter(())
        self.current: _Meeting | None = None


class PairwiseExchange(TransportSteps, Exchange):
    """A dense message whose pieces pairs of ranks exchange.

    Args:
        transport: connections to the other ranks of all pairs.
        channel: number of this round in frames, the same on all ranks.
        rank: this rank in the schedule.
        message: the message, for its priority and name.
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
        self._pieces: list[_Piece] = []
        for transfer in (one for one in round.transfers if isinstance(one, PairwiseReduce)):
            for piece in transfer.pieces:
                along = (piece[0] - transfer.start) / (transfer.stop - transfer.start)
                meetings = [_Meeting(turn, buffer) for turn in transfer.turns(rank, piece)]
                self._pieces.append(_Piece(len(self._pieces), along, meetings))
        self._meetings = {
            (one.turn.peer, piece.number, one.turn.number): (piece, one)
            for piece in self._pieces
            for one in piece.meetings
        }
        turns = [one.turn for _, one in self._meetings.values()]
        self._work = sum((turn.sends is not None) + (turn.receives is not None) for turn in turns)
        transport.register(channel, self)

    def start(self) -> None:
        self._launch(self._begin)

    def wait(self) -> None:
        self._completion.wait()

    def _begin(self) -> None:
        if self._enter_step(self._work):
            for piece in self._pieces:
                piece.further = iter(piece.meetings)
                self._go_on(piece)

    def _go_on(self, piece: _Piece) -> None:
        """Begin the next exchanges of a piece, until one whose bytes have not come."""
        for meeting in piece.further:
            turn = meeting.turn
            if turn.sends is not None:
                place = (piece.number, turn.number, UP)
                self._send(Peer(turn.peer), place, meeting.send(), piece.along, self._progress)
            if turn.receives is not None and not meeting.came:
                piece.current = meeting
                return
            self._end(meeting)

    def _end(self, meeting: _Meeting) -> None:
        if meeting.turn.receives is None:
            return
        with profiled(self._name, "reduce" if meeting.turn.adds else "broadcast"):
            meeting.take()
        self._progress()

    def destination(self, peer: int, frame: Frame) -> memoryview:
        _, meeting = self._meeting(peer, frame)
        self._check_step(peer, frame, meeting.step)
        if meeting.turn.receives is None or len(meeting.inbox) != frame.size:
            raise ExchangeError(f"rank {peer} sent a piece of {frame.size} bytes that is not in the schedule")
        return meeting.inbox

    def arrived(self, peer: int, frame: Frame) -> None:
        piece, meeting = self._meeting(peer, frame)
        meeting.came = True
        if meeting is piece.current:
            piece.current = None
            self._end(meeting)
            self._go_on(piece)

    def _meeting(self, peer: int, frame: Frame) -> tuple[_Piece, _Meeting]:
        try:
            return self._meetings[peer, frame.transfer, frame.piece]
        except KeyError:
            raise ExchangeError(f"rank {peer} sent a piece that is not in the schedule") from None
