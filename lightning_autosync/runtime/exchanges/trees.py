"""Dense messages along trees: segments are summed on their way up and handed out on their way down.

Every segment travels on its own, so levels overlap, several trees are under way at once, and the way down begins
while the way up is still busy. All work is done on the transport's thread.
"""

from __future__ import annotations

from torch import Tensor

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message, Round, TreeTransfer
from lightning_autosync.runtime.codecs import Residual
from lightning_autosync.runtime.exchanges.base import Completion, Departures, Exchange
from lightning_autosync.runtime.exchanges.segments import Segment, lay_out
from lightning_autosync.runtime.transport import DOWN, UP, Frame, Transport


class TreeExchange(Exchange):
    """One round of a message over its trees.

    Args:
        transport: connections to the peers on the trees.
        channel: the number under which peers know this round.
        rank: this rank in the schedule.
        message: the message, for its compressor, priority and name.
        round: which of its rounds.
        buffer: CPU tensor [round.length]; summed in place.
        timeout: seconds to wait for the other ranks.
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
        self._transport = transport
        self._channel = channel
        self._priority = message.priority
        self._step = 0
        self._open = 0
        self._completion = Completion(f"message '{message.name}'", timeout)
        self._departures = Departures()
        lossy = message.compressor.kind not in ("none", "powersgd")
        self.residual = Residual(buffer) if lossy and message.compressor.error_feedback else None
        tail_start = round.length - message.tail
        self._paths = [
            lay_out(transfer, rank, message.compressor, buffer, tail_start, self.residual)
            for transfer in round.transfers
            if isinstance(transfer, TreeTransfer)
        ]
        # Neighbouring pieces of different trees leave together, so that all trees progress at one pace.
        self._order = sorted(
            ((segment.place, number, segment) for number, path in enumerate(self._paths) for segment in path.segments),
            key=lambda entry: entry[:2],
        )
        self._transfer_numbers = {id(path): number for number, path in enumerate(self._paths)}
        self._work = sum(1 + len(segment.path.down_children) for _, _, segment in self._order)
        transport.register(channel, self)

    def start(self) -> None:
        self._completion.begin()
        self._transport.submit(self._begin)

    def wait(self) -> None:
        self._completion.wait()

    def _begin(self) -> None:
        self._step += 1
        self._open = self._work
        if self._departures.hinder(self._step, self._completion, self._transport.error):
            return
        if not self._open:
            self._completion.done()
        for _, _, segment in self._order:
            if segment.missing == 0:
                self._rise(segment)

    def destination(self, peer: int, frame: Frame) -> memoryview:
        segment = self._segment(peer, frame)
        expected = segment.gathering if frame.phase == UP else self._step
        if frame.step != expected:
            raise ExchangeError(f"rank {peer} is in step {frame.step} of an exchange, this rank in step {expected}")
        target = segment.inbox(peer, frame.phase)
        if target is None or len(target) != frame.size:
            raise ExchangeError(f"rank {peer} sent a piece of {frame.size} bytes that is not in the schedule")
        return target

    def arrived(self, peer: int, frame: Frame) -> None:
        segment = self._segment(peer, frame)
        if frame.phase == DOWN:
            segment.open()
            self._hand_out(segment)
            return
        segment.missing -= 1
        if segment.missing == 0 and segment.gathering == self._step:
            self._rise(segment)

    def failed(self, error: ExchangeError) -> None:
        self._completion.fail(error)

    def left(self, peer: int, step: int) -> None:
        self._departures.note(peer, step)
        self._departures.hinder(self._step, self._completion, self._transport.error)

    @property
    def completed(self) -> int:
        return self._step if self._open == 0 else self._step - 1

    def _segment(self, peer: int, frame: Frame) -> Segment:
        try:
            return self._paths[frame.transfer].segments[frame.piece]
        except IndexError:
            raise ExchangeError(f"rank {peer} sent a piece that is not in the schedule") from None

    def _rise(self, segment: Segment) -> None:
        """All contributions below are in: add them up and pass the sum on."""
        segment.reduce()
        segment.seal()
        if segment.path.up_parent is None:
            self._hand_out(segment)
        else:
            self._send(segment.path.up_parent, segment, UP)

    def _hand_out(self, segment: Segment) -> None:
        """The sum over all ranks is in: pass it down."""
        for child in segment.path.down_children:
            self._send(child, segment, DOWN)
        self._progress()

    def _send(self, peer: int, segment: Segment, phase: int) -> None:
        number = self._transfer_numbers[id(segment.path)]
        frame = Frame(self._channel, self._step, number, segment.piece, phase, len(segment.wire_bytes))
        urgency = (-self._priority, self._channel, segment.place)
        # What goes up has arrived before its sum comes down, so only the way down needs watching.
        self._transport.send(peer, frame, segment.wire_bytes, urgency, self._progress if phase == DOWN else None)

    def _progress(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._completion.done()
