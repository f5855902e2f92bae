"""Who is at fault when ranks fail each other: a thin connection beside those that carry tensors.

A backend whose peer is gone tells an address, or nothing until its time-out; and a rank that gives up closes
connections to ranks that are well. So every rank keeps one connection to the job's first rank, served by a thread of
its own. Nothing travels on it in a step. A process that dies closes it, one that leaves with an error says so, and when
ranks have waited in vain, the first one asks all who still answers: one verdict for all.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]

from lightning_autosync.engine.rendezvous import connect_pairs
from lightning_autosync.errors import ExchangeError, PeerLost

SLICE = 0.2
"""Seconds of waiting after which a rank looks whether another is lost, and whether a signal came."""
_SLICE = timedelta(seconds=SLICE)
_PATIENCE = 2.0
"""Seconds, at most, that a rank which is there takes to answer."""
_CONNECT_TIMEOUT = 120.0
_LONGEST = 64 * 1024
"""Bytes of a message."""
_SILENT = "it does not answer: its process is stopped, or its machine is cut off"
_ENDED = "it has ended, while others go on"


class Verdict(NamedTuple):
    """Who is at fault, and why; the rank is None if all are there and answer."""

    rank: int | None
    why: str


class Inquiry:
    """What the first rank knows of the others, and what follows from it.

    Args:
        ranks: the others.
        patience: seconds after which a rank that does not answer is silent.
    """

    def __init__(self, ranks: set[int], patience: float) -> None:
        self.present = ranks
        self._patience = patience
        self._left: set[int] = set()
        self._pinged: dict[int, float] = {}
        self._waiting: dict[int, float | None] = {}
        self._asked: float | None = None
        self._first = 0
        self._late = False

    def unasked(self, now: float) -> list[int]:
        """Ranks to ask whether they are there: all whose answer is not under way."""
        fresh = sorted(self.present - self._pinged.keys())
        self._pinged.update(dict.fromkeys(fresh, now))
        return fresh

    def ask(self, now: float, late: bool, rank: int) -> None:
        """A rank wants a verdict; ``late`` if it has waited for as long as it may."""
        if self._asked is None:
            self._asked, self._first = now, rank
        self._late = self._late or late

    def answered(self, rank: int, waiting: float | None) -> None:
        """A rank is there, and has waited for others for so many seconds; None if it does not wait."""
        self._pinged.pop(rank, None)
        self._waiting[rank] = waiting

    def leave(self, rank: int) -> None:
        """A rank has ended in good order."""
        self.forget(rank)
        self._left.add(rank)

    def forget(self, rank: int) -> None:
        """A rank is not there any more."""
        self.present.discard(rank)
        self._pinged.pop(rank, None)
        self._waiting.pop(rank, None)

    @property
    def open(self) -> bool:
        """Whether somebody waits for a verdict."""
        return self._asked is not None

    def verdict(self, now: float) -> Verdict | None:
        """The verdict if it is asked for and known by now."""
        if self._asked is None:
            return None
        silent = sorted(self._pinged)
        if any(now - self._pinged[rank] < self._patience for rank in silent):
            return None
        if silent:
            others = f"; nor do ranks {', '.join(map(str, silent[1:]))}" if silent[1:] else ""
            return Verdict(silent[0], _SILENT + others)
        # A process that dies closes its connections one after the other.
        if now - self._asked < self._patience / 4:
            return None
        if self._left:
            return Verdict(min(self._left), _ENDED)
        elsewhere = sorted(rank for rank, waiting in self._waiting.items() if waiting is None)
        if self._late and elsewhere:
            return Verdict(elsewhere[0], "it is alive, but does not come: it is busy, or stuck, with something else")
        if self._late:
            different = "all ranks are there and answer, but wait for each other in different calls"
            return Verdict(None, f"{different}; the first whose time was over is rank {self._first}")
        return Verdict(
            None, f"all ranks are there and answer; rank {self._first} was the first whose connection failed"
        )


class _Connection:
    """One connection, and what has come in and not gone out."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.lost: str | None = None
        self._unread = bytearray()
        self._unsent = bytearray()
        connection.setblocking(False)

    def read(self) -> list[dict[str, Any]]:
        """The messages that are complete; `lost` says why there will be no more."""
        try:
            data = self.socket.recv(_LONGEST)
            if not data:
                self.lost = "its process has ended"
        except BlockingIOError:
            return []
        except OSError as cause:
            self.lost = f"its process has ended, or its network was cut ({cause.strerror})"
            return []
        *lines, rest = (bytes(self._unread) + data).split(b"\n")
        self._unread = bytearray(rest)
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            found = [None]
        if len(rest) > _LONGEST or not all(isinstance(message, dict) for message in found):
            self.lost = "it sent what is no message"
            return []
        return found

    def send(self, message: dict[str, Any]) -> None:
        """Hand to the kernel what it takes; who reads nothing any more gets the rest with the next message."""
        self._unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            del self._unsent[: self.socket.send(self._unsent)]


class Watch(ABC):
    """What a process looks at while it waits for other ranks.

    Attributes:
        timeout: seconds that ranks wait for each other.
        patience: seconds before the end of that time at which to `wonder`.
    """

    timeout: float
    patience: float = _PATIENCE

    @abstractmethod
    def look(self) -> None:
        """Call now and then while waiting.

        Raises:
            ExchangeError: a rank is lost, or this one is to end.
        """

    @abstractmethod
    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        """Why an exchange with other ranks failed: an error that names the rank at fault, where one is.

        Args:
            cause: what this rank saw.
            late: whether it waited for as long as it may.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for other ranks."""
        return nullcontext()

    def wonder(self) -> None:  # noqa: B027 - not all have somebody to ask
        """The time-out is near: find out who is there, so that the verdict is known when it is over."""

    def fail(self, error: BaseException) -> None:  # noqa: B027 - as before
        """This rank ends with an error of its own, or with one that another has caused: tell all."""


class Lifeline(Watch):
    """One rank's end of the connections; see the module.

    Args:
        rank: this rank.
        sockets: connected stream sockets: of rank 0 to all others, of another rank to rank 0; owned from now on.
        timeout: seconds that ranks wait for each other.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.patience = min(_PATIENCE, timeout / 4)
        self.verdict: Verdict | None = None
        self._known, self._parted = threading.Event(), threading.Event()
        self._inquiry = Inquiry(set(sockets), self.patience) if rank == 0 else None
        self._waits: dict[object, float] = {}
        """Since when each thread that waits does so."""
        self._terminated: float | None = None
        self._unanswered: float | None = None
        """Since when rank 0 owes an answer."""
        self._first_left = False
        self._closed = self._over = False
        self._orders: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._connections = {peer: _Connection(peer, connection) for peer, connection in sockets.items()}
        for connection in self._connections.values():
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._thread = threading.Thread(target=self._serve, name="autosync-lifeline", daemon=True)
        self._thread.start()
        _ends.add(self)
        _lines.append(self)
        _watch_works()
        atexit.register(self._end_with_process)

    # For the threads that wait

    def look(self) -> None:
        if self.verdict is not None:
            raise self._error(self.verdict, "")
        if self._terminated is not None and time.monotonic() - self._terminated > self.patience:
            raise ExchangeError("this rank got a SIGTERM while it waited for others, which did not come")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        wait = object()
        self._waits[wait] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[wait]

    def wonder(self) -> None:
        self._submit(self._begin)

    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        self._submit(lambda: self._ask(late))
        deadline = time.monotonic() + 3 * self.patience
        while not self._known.wait(self.patience / 10) and time.monotonic() < deadline:
            since = self._unanswered
            if since is not None and time.monotonic() - since > self.patience:
                self._submit(lambda: self._tell(Verdict(0, _SILENT)))
        return self._error(self.verdict or Verdict(None, "no rank is known to be lost"), cause)

    def fail(self, error: BaseException) -> None:
        if self._closed:
            return
        terminated = self._terminated is not None
        why = "it got a SIGTERM" if terminated else f"it ended with {type(error).__name__}: {error}"
        culprit = error.peer if isinstance(error, PeerLost) else self.rank
        why = error.why if isinstance(error, PeerLost) else why
        self._submit(lambda: self._tell(Verdict(culprit, why[: _LONGEST // 16])))

    def terminate(self) -> None:
        """This process got a SIGTERM: it ends with its step, or soon if others do not let it."""
        self._terminated = self._terminated or time.monotonic()

    def close(self) -> None:
        """Take leave of the others."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end_with_process)
        if self in _lines:
            _lines.remove(self)
        _watch_works()
        self._submit(self._take_leave)
        # The first rank's thread serves the others for as long as they, and this process, go on.
        self._parted.wait(self.patience)

    def _end_with_process(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.fail(error)
        self.close()

    def _error(self, verdict: Verdict, cause: str) -> ExchangeError:
        if verdict.rank is None:
            return ExchangeError(f"{cause or 'an exchange failed'}; {verdict.why}")
        if verdict.why == _ENDED and f"rank {verdict.rank} " in cause:
            return ExchangeError(cause)
        if verdict.rank == self.rank:
            return ExchangeError(f"the other ranks have given up this one, rank {self.rank}: {verdict.why}")
        return PeerLost(verdict.rank, verdict.why)

    @property
    def _waiting_since(self) -> float | None:
        """Since when this rank waits for others, on whatever thread; None if it does not."""
        return min(self._waits.copy().values(), default=None)

    # On the thread

    def _submit(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        with suppress(OSError):
            self._wake.send(b"\0")

    def _serve(self) -> None:
        while not self._over:
            busy = self._inquiry is not None and self._inquiry.open and self.verdict is None
            for key, _ in self._selector.select(self.patience / 10 if busy else None):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.data.lost is None:
                    self._attend(key.data)
            while self._orders:
                self._orders.popleft()()
            if self._inquiry is not None:
                if self.verdict is None and (found := self._inquiry.verdict(time.monotonic())):
                    self._tell(found)
                self._over = self._over or (self._closed and not self._inquiry.present)
        self._release()

    def _attend(self, connection: _Connection) -> None:
        for message in connection.read():
            self._take(connection, message)
        if connection.lost is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._lose(connection.rank, connection.lost)

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        self._unanswered = None
        rank = connection.rank
        match message:
            case {"are you there": _}:
                since = self._waiting_since
                connection.send({"waiting": None if since is None else time.monotonic() - since})
            case {"waiting": seconds} if self._inquiry is not None:
                self._inquiry.answered(rank, seconds)
            case {"ask": late} if self._inquiry is not None:
                if self.verdict is not None:
                    connection.send({"verdict": [*self.verdict]})
                self._ask(bool(late), rank)
            case {"wonder": _} if self._inquiry is not None:
                connection.send({"here": True})
                self._begin()
            case {"verdict": [int() | None as culprit, str() as why]}:
                (self._judge if self._inquiry is None else self._tell)(Verdict(culprit, why))
            case {"leave": _}:
                if self._inquiry is not None:
                    self._inquiry.leave(rank)
                self._first_left = rank == 0

    def _begin(self) -> None:
        """Find out who is there."""
        if self._inquiry is None:
            self._owe({"wonder": True})
            return
        for rank in self._inquiry.unasked(time.monotonic()):
            self._connections[rank].send({"are you there": True})

    def _ask(self, late: bool, rank: int = 0) -> None:
        if self.verdict is not None:
            return
        if self._inquiry is not None:
            self._begin()
            self._inquiry.answered(0, None if self._waiting_since is None else 0.0)
            self._inquiry.ask(time.monotonic(), late, rank)
        elif self._first_left:
            self._judge(Verdict(0, _ENDED))
        else:
            self._owe({"ask": late})

    def _owe(self, message: dict[str, Any]) -> None:
        self._unanswered = self._unanswered or time.monotonic()
        self._connections[0].send(message)

    def _lose(self, rank: int, why: str) -> None:
        if self._inquiry is not None:
            lost = rank in self._inquiry.present
            self._inquiry.forget(rank)
            if lost:
                self._tell(Verdict(rank, why))
        elif not self._first_left:
            self._judge(Verdict(0, why))

    def _tell(self, verdict: Verdict) -> None:
        """Let all have this verdict, unless the first rank has another one already."""
        if self.verdict is not None:
            return
        self._judge(verdict)
        for connection in self._connections.values():
            if connection.lost is None:
                connection.send({"verdict": [*verdict]})

    def _judge(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._known.set()

    def _take_leave(self) -> None:
        for connection in self._connections.values():
            if connection.lost is None:
                connection.send({"leave": True})
        self._over = self._inquiry is None or not self._inquiry.present
        self._parted.set()

    def _release(self) -> None:
        for connection in [one.socket for one in self._connections.values()] + [self._wake, self._woken]:
            connection.close()
        self._selector.close()

    def forsake(self) -> None:
        """In a forked child: its copies of the connections would hide that the parent has died."""
        for connection in [one.socket for one in self._connections.values()] + [self._wake, self._woken]:
            connection.close()


_lines: list[Watch] = []
"""Those that are open; what this process waits for, it looks at the last one."""
_ends: WeakSet[Lifeline] = WeakSet()
_POINT_TO_POINT = {int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)}
"""Works that cannot be asked whether they are complete."""
_PLACE = re.compile(r"^\[\S+\] ")
"""Where in its own source a backend found an error."""
_UNDER_WAY = "Operation timed out!"
"""What a work's ``wait`` says when the time that it was given is over."""
_plain_wait = dist.Work.wait


def open_lifeline(group: dist.ProcessGroup | None, timeout: float, address: str | None = None) -> Lifeline | None:
    """Connect the ranks of ``group`` (None is the default one), collectively; None for one rank.

    While it is open, every collective call of this process that waits for a backend on CPUs ends with an
    `ExchangeError` that names the rank at fault, whoever made the call.

    Args:
        group: the ranks.
        timeout: seconds that ranks wait for each other.
        address: where this rank listens while they connect; None takes `own_address`.

    Raises:
        ExchangeError: ranks cannot connect to each other.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return None
    edges = [(0, other) for other in range(1, size)]
    return Lifeline(rank, connect_pairs(edges, group, address, min(timeout, _CONNECT_TIMEOUT)), timeout)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Inside, whoever waits for other ranks looks at ``watch``."""
    _lines.append(watch)
    _watch_works()
    try:
        yield
    finally:
        _lines.remove(watch)
        _watch_works()


def wait_watched(ready: Callable[[float], bool], what: str, timeout: float, has_own_end: bool = False) -> None:
    """Wait for other ranks.

    Args:
        ready: waits for as many seconds as it is told, at most, and returns whether what is waited for is there.
        what: that which errors name.
        timeout: seconds to wait.
        has_own_end: whether ``ready`` raises when its own time-out is over, which may be a longer one.

    Raises:
        ExchangeError: (which names the rank at fault) a rank is lost, or did not come in ``timeout`` seconds.
    """
    if ready(min(SLICE, timeout)):
        return
    line = _lines[-1] if _lines else None
    deadline, wondering = time.monotonic() + timeout - SLICE, False
    with line.waiting() if line is not None else nullcontext():
        while not ready(SLICE):
            now = time.monotonic()
            if line is not None:
                line.look()
                if not wondering and now >= deadline - line.patience:
                    wondering = True
                    line.wonder()
            if now >= deadline and not has_own_end:
                raise explained(
                    f"{what}: no answer from the other ranks in {timeout:g} s; one of them is stuck, or they do not "
                    "run the same steps",
                    late=True,
                )


def explained(cause: BaseException | str, late: bool = False) -> ExchangeError:
    """The error to raise where an exchange failed: it names the rank at fault, as far as that is known.

    Args:
        cause: what this rank saw.
        late: whether it waited for as long as it may.
    """
    if isinstance(cause, PeerLost):
        return cause
    if _lines:
        return _lines[-1].explain(str(cause), late)
    return cause if isinstance(cause, ExchangeError) else ExchangeError(str(cause))


def report(error: BaseException) -> None:
    """This rank ends with an error: let the others name it."""
    if _lines:
        _lines[-1].fail(error)


def _watch_works() -> None:
    """While a lifeline is open, whoever waits for a collective call looks at it now and then."""
    watched = _lines and _waits_in_slices()
    dist.Work.wait = _wait if watched else _plain_wait  # type: ignore[method-assign, assignment]


def _waits_in_slices() -> bool:
    """Whether works of the default group can be waited for in slices of time.

    Gloo's can. With NCCL, a wait that has a time-out blocks the process, and aborts the group when the time is over.
    """
    if not dist.is_initialized():
        return True
    return {pair.rpartition(":")[2] for pair in dist.get_backend_config().split(",")} == {"gloo"}


def _wait(work: Any, *arguments: Any, **options: Any) -> Any:
    if arguments or options or not _lines or work._get_op_type() in _POINT_TO_POINT:
        return _plain_wait(work, *arguments, **options)
    slices = 0

    def ready(seconds: float) -> bool:
        nonlocal slices
        slices += 1
        return _complete(work, seconds)

    timeout = _lines[-1].timeout
    try:
        wait_watched(ready, "a collective call", timeout, has_own_end=True)
    except ExchangeError:
        raise
    except RuntimeError as cause:
        late = "imed out" in str(cause) or slices * SLICE > 0.9 * timeout
        raise explained(f"a collective call failed: {_PLACE.sub('', str(cause).splitlines()[0])}", late) from cause
    return True


def _complete(work: Any, seconds: float) -> bool:
    """Whether ``work`` is complete, after ``seconds`` at most; not all kinds can be asked for that without a wait.

    Raises:
        RuntimeError: it failed.
    """
    try:
        _plain_wait(work, _SLICE if seconds == SLICE else timedelta(seconds=seconds))
    except RuntimeError as cause:
        if _UNDER_WAY not in str(cause):
            raise
        return False
    return True


def _after_fork() -> None:
    for line in list(_ends):
        line.forsake()
    _lines.clear()


os.register_at_fork(after_in_child=_after_fork)
