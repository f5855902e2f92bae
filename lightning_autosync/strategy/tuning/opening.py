"""Plans are opened and closed on a thread, so that no training step waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from lightning_autosync.engine import Engine
from lightning_autosync.engine.resources import Resources
from lightning_autosync.errors import OpeningError

_TURN = 0.0005
"""Seconds for which this package's work on a thread may keep other threads of Python from running. By default these
are 0.005 s, and a training step has hundreds of moments at which its thread asks for its turn."""


@contextmanager
def short_turns() -> Iterator[None]:
    """Within the context, threads of Python that compute take turns ten times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN, usual))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class BackgroundOpening:
    """Opens plans one after the other while training continues, and closes those that are not needed any more.

    Args:
        reserve: opens the resources of a plan, given its index; collective. It runs on a thread of its own, so it needs
            a process group that nothing else uses.

    Attributes:
        plan: index of the plan that is being opened, or open and not taken; None if there is none.
    """

    def __init__(self, reserve: Callable[[int], Resources]) -> None:
        self._reserve = reserve
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autosync-opening")
        self._resources: Future[Resources] | None = None
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
        if error is not None and not isinstance(error, OpeningError):
            raise error
        return False

    def take(self) -> Resources:
        """The resources of the plan, once it is open.

        Raises:
            OpeningError: (on every rank) ranks cannot open it.
        """
        assert self._resources is not None
        found, self.plan, self._resources = self._resources, None, None
        return found.result()

    def discard(self, engines: Iterable[Engine]) -> None:
        """Close engines that are not in use, before any plan that is started later is opened."""
        self._closings += [self._thread.submit(engine.release().close) for engine in engines]

    def close(self) -> None:
        """Wait until all is done, and close the plan that was not taken."""
        self._thread.shutdown()
        if self._resources is not None and self._resources.exception() is None:
            self.take().close()
        for closing in self._closings:
            closing.result()

    def _run(self, plan: int) -> Resources:
        with short_turns():
            return self._reserve(plan)
