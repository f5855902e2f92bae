"""What exchanges on trees share: which step they are in, when it is complete, and which peers have left."""

from __future__ import annotations

from collections.abc import Callable

from lightning_autosync.engine.exchanges.base import Completion
from lightning_autosync.engine.transport import DOWN, Frame, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.schedule import Message


class TreeSteps:
    """The steps of one message on its trees; the part of a `Receiver` that does not depend on what travels.

    A step is complete when every transfer has been handed out here and sent to each child: a subclass calls
    `_progress` for the first, and `_send` does for the second.

    Args:
        transport: connections to the peers on the trees.
        channel: the number under which peers know this exchange.
        message: the message, for its priority and name.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, transport: Transport, channel: int, message: Message, timeout: float) -> None:
        self._transport = transport
        self._channel = channel
        self._priority = message.priority
        self._step = 0
        self._open = 0
        self._completion = Completion(f"message '{message.name}'", timeout)
        self._last_steps: dict[int, int] = {}

    def watch(self, completed: Callable[[], None] | None) -> None:
        self._completion.watcher = completed

    def failed(self, error: ExchangeError) -> None:
        self._completion.fail(error)

    def left(self, peer: int, step: int) -> None:
        self._last_steps[peer] = step
        self._hindered()

    @property
    def completed(self) -> int:
        return self._step if self._open == 0 else self._step - 1

    def _launch(self, begin: Callable[[], None]) -> None:
        """Run ``begin`` on the transport's thread, where all that follows happens."""
        self._completion.begin()
        self._transport.submit(begin)

    def _enter_step(self, work: int) -> bool:
        """Enter the next step, complete after ``work`` calls of `_progress`; False if it cannot be completed."""
        self._step += 1
        self._open = work
        if self._hindered():
            return False
        if not work:
            self._completion.done()
        return True

    def _check_step(self, peer: int, frame: Frame, expected: int) -> None:
        if frame.step != expected:
            raise ExchangeError(f"rank {peer} is in step {frame.step} of an exchange, this rank in step {expected}")

    def _send(self, peer: int, place: tuple[int, int, int], wire: memoryview, along: float = 0.0) -> None:
        """Queue ``wire`` for ``peer``; ``place`` is transfer, piece and phase, ``along`` how far the piece lies."""
        frame = Frame(self._channel, self._step, *place, len(wire))
        urgency = (-self._priority, self._channel, along)
        # What goes up has arrived before its sum comes down, so only the way down needs watching.
        self._transport.send(peer, frame, wire, urgency, self._progress if frame.phase == DOWN else None)

    def _progress(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._completion.done()

    def _hindered(self) -> bool:
        """Whether the step cannot be completed any more; whoever waits for it is told."""
        broken = self._transport.error
        early = [peer for peer, last in self._last_steps.items() if last < self._step]
        if broken is None and early:
            last = self._last_steps[early[0]]
            broken = ExchangeError(f"rank {early[0]} has ended after step {last}; this is step {self._step}")
        if broken is not None:
            self._completion.fail(broken)
        return broken is not None
