"""Waits for other ranks in short slices. Between slices, a monitor checks whether a rank is lost.

A backend whose peer is gone reports an address, or nothing until its timeout. While a monitor is active, waits of this
package and ``wait`` of torch's collective works ask it, so that errors name the rank at fault.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]

from lightning_autosync.errors import ExchangeError, PeerLost

SLICE = 0.2
"""Seconds per slice. Python also handles signals between slices."""
ANSWER_TIMEOUT = 2.0
"""Longest time in seconds that a live rank takes to answer."""


class Monitor(ABC):
    """Knows which ranks are lost.

    Attributes:
        timeout: seconds that ranks wait for each other.
        answer_timeout: seconds in which a live rank answers; `prepare` is called that long before the timeout.
    """

    timeout: float
    answer_timeout: float = ANSWER_TIMEOUT

    @abstractmethod
    def check(self) -> None:
        """Check for lost ranks; waits call this after each slice.

        Raises:
            ExchangeError: a rank is lost, or this rank must end.
        """

    @abstractmethod
    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        """The error to raise after a failed exchange. It names the rank at fault, if that is known.

        Args:
            cause: the failure that this rank saw.
            late: whether this rank waited until its timeout.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """A context manager around each wait for other ranks."""
        return nullcontext()

    def prepare(self) -> None:  # noqa: B027 - not every monitor can ask other ranks
        """Ask the other ranks shortly before the timeout, so that the answer is known when it is over."""

    def announce(self, error: BaseException) -> None:  # noqa: B027 - as before
        """Tell all ranks that this one ends with ``error``."""

    def count_batch(self) -> None:  # noqa: B027 - as before
        """Count a batch of which all ranks have a part, as this rank begins it."""


_monitors: list[Monitor] = []
"""Active monitors; waits ask the last one."""
_SLICE = timedelta(seconds=SLICE)
_POINT_TO_POINT = {int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)}
"""Types of works that do not support waits in slices."""
_SOURCE_LINE = re.compile(r"^\[\S+\] ")
"""The position in the backend's source with which its errors begin."""
_NOT_YET = "Operation timed out!"
"""Text of the error of a work's ``wait`` when its timeout is over."""
_torch_wait = dist.Work.wait


def activate(monitor: Monitor) -> None:
    """Let all waits of this process ask ``monitor``, until `deactivate`."""
    _monitors.append(monitor)
    _patch_works()


def deactivate(monitor: Monitor) -> None:
    """Undo `activate`; a second call has no effect."""
    if monitor in _monitors:
        _monitors.remove(monitor)
    _patch_works()


@contextmanager
def monitored_by(monitor: Monitor) -> Iterator[None]:
    """Within the context, all waits of this process ask ``monitor``."""
    activate(monitor)
    try:
        yield
    finally:
        deactivate(monitor)


def wait_for_ranks(ready: Callable[[float], bool], what: str, timeout: float, raises_late: bool = False) -> None:
    """Wait for other ranks until ``ready`` returns True.

    Args:
        ready: waits for at most the given number of seconds; returns whether the wait is over.
        what: name of the awaited event in errors.
        timeout: seconds to wait.
        raises_late: whether ``ready`` itself raises after its own timeout, which may be longer.

    Raises:
        ExchangeError: a rank is lost, or did not answer in ``timeout`` seconds. The error names the rank at fault.
    """
    if ready(min(SLICE, timeout)):
        return
    monitor = _monitors[-1] if _monitors else None
    deadline, prepared = monotonic() + timeout - SLICE, False
    with monitor.waiting() if monitor is not None else nullcontext():
        while not ready(SLICE):
            now = monotonic()
            if monitor is not None:
                monitor.check()
                if not prepared and now >= deadline - monitor.answer_timeout:
                    prepared = True
                    monitor.prepare()
            if now >= deadline and not raises_late:
                raise explained(
                    f"{what}: no answer from the other ranks in {timeout:g} s; one of them is stuck, or they do not "
                    "run the same steps",
                    late=True,
                )


@contextmanager
def watched_wait() -> Iterator[Callable[[], None]]:
    """The context of a wait for other ranks that is not a collective call.

    Yields:
        The check to call again and again: it raises `ExchangeError`, which names the rank, if a rank is lost.
    """
    monitor = _monitors[-1] if _monitors else None
    with monitor.waiting() if monitor is not None else nullcontext():
        yield monitor.check if monitor is not None else lambda: None


def explained(cause: BaseException | str, late: bool = False) -> ExchangeError:
    """The error to raise after a failed exchange; see `Monitor.explain`."""
    if isinstance(cause, PeerLost):
        return cause
    if _monitors:
        return _monitors[-1].explain(str(cause), late)
    return cause if isinstance(cause, ExchangeError) else ExchangeError(str(cause))


def announce(error: BaseException) -> None:
    """Tell the other ranks that this rank ends with ``error``, if a monitor is active."""
    if _monitors:
        _monitors[-1].announce(error)


def count_batch() -> None:
    """Tell the active monitor, if any, that this rank begins a batch of which all ranks have a part."""
    if _monitors:
        _monitors[-1].count_batch()


def _patch_works() -> None:
    """Replace ``wait`` of torch's works with `_wait` while a monitor is active."""
    patched = _monitors and _can_wait_in_slices()
    dist.Work.wait = _wait if patched else _torch_wait  # type: ignore[method-assign, assignment]


def _can_wait_in_slices() -> bool:
    """Whether works of all groups support waits in slices. A work does not tell the group that it belongs to.

    Gloo's works do. With NCCL, a wait with a timeout blocks the process, and aborts the group when the time is over.
    """
    if not dist.is_initialized():
        return True
    # A copy, because other threads may make groups meanwhile.
    return all(map(_is_gloo, [*dist.distributed_c10d._world.pg_backend_config.values()]))


@cache
def _is_gloo(config: str) -> bool:
    """Whether a group's backend is gloo on all devices, from its configuration, such as ``cpu:gloo,cuda:gloo``."""
    return {pair.rpartition(":")[2] for pair in config.split(",")} == {"gloo"}


def _wait(work: Any, *arguments: Any, **options: Any) -> Any:
    """Replaces ``torch.distributed.Work.wait``. Waits to which the caller gave a timeout stay as they are."""
    whole = arguments or options or not _monitors or work._get_op_type() in _POINT_TO_POINT
    if whole or not _can_wait_in_slices():  # groups may have been made since the monitor became active
        return _torch_wait(work, *arguments, **options)
    slices = 0

    def ready(seconds: float) -> bool:
        nonlocal slices
        slices += 1
        try:
            # Some types of works report completion only through a wait with a timeout.
            _torch_wait(work, _SLICE if seconds == SLICE else timedelta(seconds=seconds))
        except RuntimeError as cause:
            if _NOT_YET not in str(cause):
                raise
            return False
        return True

    timeout = _monitors[-1].timeout
    try:
        wait_for_ranks(ready, "a collective call", timeout, raises_late=True)
    except ExchangeError:
        raise
    except RuntimeError as cause:
        # Backends word their timeouts differently, so the time waited also counts.
        late = "imed out" in str(cause) or slices * SLICE > 0.9 * timeout
        reason = _SOURCE_LINE.sub("", str(cause).splitlines()[0])
        raise explained(f"a collective call failed: {reason}", late) from cause
    return True


os.register_at_fork(after_in_child=_monitors.clear)
