"""One pass over the data, dealt out in small portions: whoever is faster takes more.

With a fixed share a worker, an epoch lasts as long as its slowest worker, and nothing that relaxed consistency gains
in between is left at its end.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.mesh import Mail, Mesh

_DEALER = 0
"""The rank that deals; relaxed training ends without it in any case."""
_KEPT = 2
"""Passes that are remembered: a slow worker may still ask for the one before."""


class SharedWork:
    """Deals out the positions ``0 .. length - 1`` of each pass, every one once.

    Each worker's first portion is kept for it (`first`), the rest goes to whoever asks (`take`): a worker without any
    would take no part in what a training loop does after its last batch, and the others would wait for it there.

    Args:
        mesh: all workers, on each of which one of these is made before any calls `take`; then servers, if any.
        workers: how many there are; all ask for portions of one size.
        timeout: seconds to wait for the dealer.
    """

    def __init__(self, mesh: Mesh, workers: int, timeout: float) -> None:
        self._mesh = mesh
        self._workers = workers
        self._timeout = timeout
        self._next: dict[int, int] = {}
        self._lock = threading.Lock()
        if mesh.rank == _DEALER:
            self._unsubscribe = mesh.subscribe("work?", self._answer)

    def close(self) -> None:
        """Deal no more; may be called again."""
        if self._mesh.rank == _DEALER:
            self._unsubscribe()

    def first(self, length: int, count: int) -> range:
        """This worker's first ``count`` positions of any pass, however late it comes for them."""
        start = min(length, self._mesh.rank * count)
        return range(start, min(length, start + count))

    def take(self, epoch: int, length: int, count: int) -> range:
        """The next ``count`` positions of a pass after all first ones, fewer at its end and none after it.

        Raises:
            ExchangeError: the dealer was lost or did not answer in time.
        """
        if self._mesh.rank == _DEALER:
            return self._deal(epoch, length, count)
        self._mesh.send(_DEALER, "work?", {"epoch": epoch, "length": length, "count": count})
        while True:
            header = self._mesh.receive("work", sender=_DEALER, timeout=self._timeout).header
            if header["epoch"] == epoch:
                return range(header["start"], header["stop"])

    def _answer(self, mail: Mail) -> None:
        portion = self._deal(**mail.header)
        answer = {"epoch": mail.header["epoch"], "start": portion.start, "stop": portion.stop}
        with suppress(ExchangeError):  # it was lost, or this rank is about to leave
            self._mesh.send(mail.sender, "work", answer)

    def _deal(self, epoch: int, length: int, count: int) -> range:
        with self._lock:
            start = self._next.get(epoch, min(length, self._workers * count))
            stop = min(length, start + count)
            self._next[epoch] = stop
            for old in [number for number in self._next if number <= epoch - _KEPT]:
                del self._next[old]
        return range(start, stop)
