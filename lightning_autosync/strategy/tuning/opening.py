"""Plans are opened and closed on a thread, so that no training step waits for it."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from lightning_autosync.engine import Engine
from lightning_autosync.engine.resources import Resources
from lightning_autosync.engine.waiting import SLICE
from lightning_autosync.errors import OpeningError, PeerLost

_TURN = 0.0005
"""Seconds for which this package's work on a thread may keep other threads of Python from running. By default these
are 0.005 s, and a training step has hundreds of moments at which its thread asks for its turn."""

SHARE = 0.05
"""Share of a core with which a rank opens a plan. Several ranks may share a core, and all open it at the same time."""
LONGEST_REST = 0.75 * SLICE
"""Seconds. Ranks that wait longer for one that rests would begin to ask which rank is lost, and that takes CPU time."""


class _Turns:
    """How many contexts of `short_turns` are open in this process, and the interval that was usual before the first."""

    lock = threading.Lock()
    open = 0
    usual = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Within the context, threads of Python that compute take turns ten times as often as usual.

    The interval belongs to the process. The last of several contexts, on any threads, restores it.
    """
    with _Turns.lock:
        if not _Turns.open:
            _Turns.usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_TURN, _Turns.usual))
        _Turns.open += 1
    try:
        yield
    finally:
        with _Turns.lock:
            _Turns.open -= 1
            if not _Turns.open:
                sys.setswitchinterval(_Turns.usual)


class Rests:
    """Spreads the work of a thread over time: after each piece of work, the thread rests a multiple of its CPU time.

    Args:
        share: share of a core that the thread takes on average, if no piece of work is so long that its rest would be
            longer than `LONGEST_REST`.
        ended: set when there is no time to rest any more.
    """

    def __init__(self, share: float, ended: threading.Event) -> None:
        self._factor, self._ended = 1 / share - 1, ended
        self._rested = time.thread_time()

    def __call__(self) -> None:
        """Rest; call it on the thread."""
        self._ended.wait(min(LONGEST_REST, self._factor * (time.thread_time() - self._rested)))
        self._rested = time.thread_time()


class BackgroundOpening:
    """Opens plans one after the other while training continues, and closes those that are not needed any more.

    Args:
        reserve: opens the resources of a plan, given its index; collective. It runs on a thread of its own, so it needs
            a process group that nothing else uses. It calls its second argument between pieces of its work.

    Attributes:
        plan: index of the plan that is being opened, or open and not taken; None if there is none.
    """

    def __init__(self, reserve: Callable[[int, Callable[[], None]], Resources]) -> None:
        self._reserve = reserve
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autosync-opening")
        self._resources: Future[Resources] | None = None
        self._told = False
        self._ended = threading.Event()
        self._closings: list[Future[None]] = []
        self.plan: int | None = None

    def start(self, plan: int) -> None:
        """Begin to open a plan. All ranks start the same plans in the same order."""
        self.plan, self._resources = plan, self._thread.submit(self._run, plan)

    def is_under_way(self) -> bool:
        """Whether a plan is still being opened on this rank.

        Raises:
            ExchangeError: (or another error) opening it has failed on this rank, and the others may still wait for it.
        """
        if self._resources is None or not self._resources.done():
            return self._resources is not None
        error = self._resources.exception()
        try:
            if error is not None and not isinstance(error, OpeningError):
                self._told = True
                raise error
        finally:
            del error  # its traceback would keep itself and the buffers through this frame
        return False

    def take(self) -> Resources:
        """The resources of the plan, once it is open.

        Raises:
            OpeningError: (on every rank) ranks cannot open it.
        """
        assert self._resources is not None
        found, self.plan, self._resources = self._resources, None, None
        try:
            return found.result()
        finally:
            del found  # the error's traceback would keep itself and the buffers through this frame

    def discard(self, engines: Iterable[Engine]) -> None:
        """Close engines that are not in use, before any plan that is started later is opened."""
        self._closings = [each for each in self._closings if not each.done() or each.exception() is not None]
        self._closings += [self._thread.submit(engine.release().close) for engine in engines]

    def close(self) -> None:
        """Wait until all is done, and close the plan that was not taken.

        A warning tells if it could not be opened, except where ranks expect that: see `OpeningError` and `PeerLost`.
        """
        self._ended.set()
        self._thread.shutdown()
        if self._resources is not None:
            error = self._resources.exception()
            if error is None:
                self.take().close()
            elif not self._told and not isinstance(error, (OpeningError, PeerLost)):
                warnings.warn(
                    f"AutoSync: a further plan (number {self.plan}) was not ready when trials ended, because setting "
                    f"it up failed: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
            self._resources = None  # frees what the error's traceback keeps
        for closing in self._closings:
            closing.result()

    def _run(self, plan: int) -> Resources:
        with short_turns():
            return self._reserve(plan, Rests(SHARE, self._ended))
