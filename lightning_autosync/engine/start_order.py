"""`StartOrder`: when the messages of a backward pass may start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_autosync.engine.gradients import MessageGradients


class StartOrder:
    """Starts collectives in schedule order and other messages at once.

    Messages may complete in different orders on different ranks, but backends match collectives by the order of calls.

    Args:
        gradients: the messages, in schedule order.
        start: starts a message.
    """

    def __init__(self, gradients: Sequence[MessageGradients], start: Callable[[MessageGradients], None]) -> None:
        self._gradients = gradients
        self._start = start
        self._next = 0

    def begin_pass(self) -> None:
        """Begin a backward pass, in which no message has started."""
        self._next = 0

    def complete(self, gradients: MessageGradients) -> None:
        """Start a message whose gradients have all arrived, or keep it until the collectives before it are complete."""
        if not gradients.message.collective:
            self._start(gradients)
            return
        while self._next < len(self._gradients):
            following = self._gradients[self._next]
            if following.message.collective and following.active:
                if following.missing:
                    return
                self._start(following)
            self._next += 1
