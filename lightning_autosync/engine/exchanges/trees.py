"""Dense messages along trees: segments are summed on their way up and handed out on their way down.

Every segment travels on its own, so levels overlap, several trees are under way at once, and the way down begins
while the way up is still busy. All work is done on the transport's thread.
"""

from __future__ import annotations

from torch import Tensor

from lightning_autosync.engine.codecs import Residual
from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.exchanges.segments import Segment, lay_out
from lightning_autosync.engine.exchanges.steps import TreeSteps
from lightning_autosync.engine.transport import DOWN, UP, Frame, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message, Round, TreeTransfer


class TreeExchange(TreeSteps, Exchange):
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
        super().__init__(transport, channel, message, timeout)
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
        self._launch(self._begin)

    def wait(self) -> None:
        self._completion.wait()

    def _begin(self) -> None:
        if not self._enter_step(self._work):
            return
        for _, _, segment in self._order:
            if segment.missing == 0:
                self._rise(segment)

    def destination(self, peer: int, frame: Frame) -> memoryview:
        segment = self._segment(peer, frame)
        self._check_step(peer, frame, segment.gathering if frame.phase == UP else self._step)
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
            self._pass(segment.path.up_parent, segment, UP)

    def _hand_out(self, segment: Segment) -> None:
        """The sum over all ranks is in: pass it down."""
        for child in segment.path.down_children:
            self._pass(child, segment, DOWN)
        self._progress()

    def _pass(self, peer: int, segment: Segment, phase: int) -> None:
        number = self._transfer_numbers[id(segment.path)]
        self._send(peer, (number, segment.piece, phase), segment.wire_bytes, segment.place)
