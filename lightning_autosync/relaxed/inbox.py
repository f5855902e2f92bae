"""Messages that wait for somebody to ask for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_autosync.errors import ExchangeError, MeshTimeout
from lightning_autosync.relaxed.messages import Mail


class Inbox:
    """A queue for each kind; filled by one thread, emptied by any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, deque[Mail]] = {}

    def put(self, mail: Mail) -> None:
        with self._changed:
            self._queues.setdefault(mail.kind, deque()).append(mail)
            self._changed.notify_all()

    def drain(self, kind: str) -> list[Mail]:
        """All that waits of a kind, which waits no more."""
        with self._changed:
            return list(self._queues.pop(kind, ()))

    def stir(self) -> None:
        """Let those who wait look again whether waiting makes sense."""
        with self._changed:
            self._changed.notify_all()

    def take(
        self, kinds: tuple[str, ...], sender: int | None, timeout: float, hopeless: Callable[[], ExchangeError | None]
    ) -> Mail:
        """The first message of one of the kinds (from ``sender``, if given).

        Raises:
            MeshTimeout: none came in ``timeout`` seconds.
            ExchangeError: what ``hopeless`` returned, once no such message was left.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while (mail := self._find(kinds, sender)) is None:
                error = hopeless()
                if error is not None:
                    raise error
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    source = "" if sender is None else f" from rank {sender}"
                    raise MeshTimeout(f"no message of kind {' or '.join(kinds)}{source} in {timeout:g} s")
            return mail

    def _find(self, kinds: tuple[str, ...], sender: int | None) -> Mail | None:
        for kind in kinds:
            queue = self._queues.get(kind, ())
            for index, mail in enumerate(queue):
                if sender is None or mail.sender == sender:
                    del self._queues[kind][index]
                    return mail
        return None
