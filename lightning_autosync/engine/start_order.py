"""`StartOrder`: when the messages of a backward pass may start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_autosync.engine.gradients import MessageGradients


class StartOrder:
    """Lets collectives start in schedule order and other messages at once.

    Messages may complete in different orders on different ranks, but backends match collectives by the order of calls.

    Args:
        gradients: the messages, in schedule order.
    """

    def __init__(self, gradients: Sequence[MessageGradients]) -> None:
        self._gradients = gradients
        self._next = 0

    def begin_pass(self) -> None:
        """Begin a backward pass, in which no message has started."""
        self._next = 0

    def complete(self, gradients: MessageGradients) -> Iterator[MessageGradients]:
        """The messages that may start, in this order, when the last gradient of one has arrived.

        A collective waits until those before it are complete.
        """
        if not gradients.message.collective:
            yield gradients
            return
        while self._next < len(self._gradients):
            following = self._gradients[self._next]
            if following.message.collective and following.active:
                if following.missing:
                    return
                yield following
            self._next += 1
