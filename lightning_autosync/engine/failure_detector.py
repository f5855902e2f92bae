"""Finds the rank at fault when an exchange fails.

A rank that gives up closes its connections to healthy ranks, so a lost connection alone does not show which rank is at
fault. Every rank therefore keeps one more connection to rank 0, which a thread of its own serves. It is idle during
steps. It breaks when a process dies, and a process that ends with an error reports the error on it. When a wait times
out, rank 0 asks all ranks for a sign of life and sends every rank the same verdict.

Often an error, or a signal, ends all ranks alike, and hooks for it make collective calls, for example to save a
checkpoint. A rank in such hooks therefore waits on for ranks that ended with an error, until they are gone or no longer
answer. Rank 0, which writes checkpoints, is the exception: it waits only while all ranks made the same calls. The
others go when it does, or when it gives up a call in its hooks.

Where their batches end, ranks also tell each other on these connections how many they had. A rank that waits in a
further batch then ends with an error that says so.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from lightning_autosync.engine.connections import CONNECT_TIMEOUT, connect_pairs
from lightning_autosync.engine.inquiry import ENDED, SILENT, Inquiry, Verdict
from lightning_autosync.engine.waiting import ANSWER_TIMEOUT, Monitor, activate, deactivate, wait_for_ranks
from lightning_autosync.errors import ExchangeError, PeerLost

_MAX_MESSAGE = 64 * 1024
"""Largest size of a message in bytes."""


class _Connection:
    """One non-blocking connection that carries JSON lines."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.lost: str | None = None
        self._unread = bytearray()
        self._unsent = bytearray()
        connection.setblocking(False)

    def read(self) -> list[dict[str, Any]]:
        """Complete messages that have arrived; `lost` gives the reason if there will be no more."""
        try:
            data = self.socket.recv(_MAX_MESSAGE)
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
        if len(rest) > _MAX_MESSAGE or not all(isinstance(message, dict) for message in found):
            self.lost = "it sent data that is not a valid message"
            return []
        return found

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message and send as much as the kernel accepts; the rest leaves with the next message."""
        self._unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            del self._unsent[: self.socket.send(self._unsent)]


class FailureDetector(Monitor):
    """One rank's failure detector; see the module's docstring.

    Args:
        rank: this rank.
        sockets: connected stream sockets by peer rank: on rank 0 to all other ranks, elsewhere to rank 0. The detector
            owns them.
        timeout: seconds that ranks wait for each other.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.answer_timeout = min(ANSWER_TIMEOUT, timeout / 4)
        self.verdict: Verdict | None = None
        self._known, self._said_goodbye = threading.Event(), threading.Event()
        self._inquiry = Inquiry(set(sockets), self.answer_timeout) if rank == 0 else None
        self._waits: dict[object, float] = {}
        """Start time of each wait, on any thread."""
        self._terminated: float | None = None
        self._unanswered: float | None = None
        """Time since which rank 0 owes this rank an answer."""
        self._first_left = False
        self._failing = False
        """Whether this rank's hooks for an error run."""
        self._asked = 0.0
        """Time at which these hooks last asked for signs of life."""
        self._broken_off = False
        """Whether this rank, or on rank 0 any rank, broke off an exchange, so that ranks made different calls."""
        self._gone: float | None = None
        """Time since which an end of this rank's connections is gone, or makes no more calls."""
        self._batches = self._trainings = 0
        """Numbers of batches that this rank has begun, and of trainings that all ranks have ended."""
        self._ends: dict[int, tuple[int, int]] = {}
        """Ends of batches, by rank: `_trainings` and `_batches` there. Other ranks than 0 know that with the fewest."""
        self._all_ended = threading.Event()
        self._closed = self._over = False
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._connections = {peer: _Connection(peer, connection) for peer, connection in sockets.items()}
        for connection in self._connections.values():
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._thread = threading.Thread(target=self._serve, name="autosync-failures", daemon=True)
        self._thread.start()
        _detectors.add(self)
        activate(self)
        atexit.register(self._end_with_process)

    # Methods for waiting threads

    def check(self) -> None:
        verdict = self._verdict_in_hooks() if self._failing else self.verdict
        if verdict is not None:
            self._give_up()
            raise self._error(verdict, "")
        if self._failing:
            return
        for rank, (training, batches) in self._ends.copy().items():
            if training == self._trainings and batches < self._batches:
                self._break_off()
                raise ExchangeError(
                    f"rank {rank} had {batches} batches until the end of training, but this rank ({self.rank}) is in "
                    f"batch {self._batches}. Give all ranks equally many, for example by limit_train_batches of the "
                    "Trainer"
                )
        if self._terminated is not None and time.monotonic() - self._terminated > self.answer_timeout:
            self._break_off()
            raise ExchangeError("this rank got a SIGTERM while it waited for other ranks, which did not answer in time")

    def _verdict_in_hooks(self) -> Verdict | None:
        """What ends a wait in this rank's hooks for an error; None while the other ranks may still come."""
        now = time.monotonic()
        # A rank that has gone may have sent its part of this call before.
        gone = self._gone is not None and now - self._gone >= self.answer_timeout / 4
        if gone or (self.rank == 0 and self._broken_off) or (self.verdict is not None and not self.verdict.announced):
            return self.verdict
        if now - self._asked >= self.answer_timeout / 4:
            self._asked = now
            self._submit(self._ask_for_life)
        silent = self._silent
        return None if silent is None else Verdict(silent, SILENT)

    @property
    def _silent(self) -> int | None:
        """A rank that owes an answer for too long; None if there is none."""
        now, since = time.monotonic(), self._unanswered
        if self._inquiry is not None:
            return next(iter(self._inquiry.silent(now)), None)
        return 0 if since is not None and now - since > self.answer_timeout else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        wait = object()
        self._waits[wait] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[wait]

    def prepare(self) -> None:
        self._submit(self._ping_all)

    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        self._give_up()
        # A backend's own error ends the wait before this is called. Without another wait, the verdict would be that
        # this rank does not come.
        with self.waiting():
            self._submit(lambda: self._request(late))
            self._await_verdict()
        return self._error(self.verdict or Verdict(None, "no rank is known to be lost"), cause)

    def announce(self, error: BaseException) -> None:
        if self._closed:
            return
        terminated = self._terminated is not None
        why = "it got a SIGTERM" if terminated else f"it ended with {type(error).__name__}: {error}"
        culprit = error.peer if isinstance(error, PeerLost) else self.rank
        why = error.why if isinstance(error, PeerLost) else why
        # JSON escapes take up to 12 bytes per character, so this length stays below the limit of a message.
        verdict = Verdict(culprit, why[: _MAX_MESSAGE // 16], announced=not isinstance(error, PeerLost))
        self._submit(lambda: self._tell_all(verdict))

    def fail(self, error: BaseException) -> None:
        """Announce that this rank ends with ``error``; from now on it waits for other ranks that do so too."""
        self.announce(error)
        self._failing = True
        # An interrupt from the keyboard comes anywhere, so it ends ranks between different calls.
        if isinstance(error, PeerLost | KeyboardInterrupt):
            self._break_off()

    def count_batch(self) -> None:
        self._batches += 1

    def end_batches(self) -> None:
        """Tell the other ranks that this one begins no further batch; a rank that waits in one then raises."""
        end = self.rank, self._trainings, self._batches
        self._submit(lambda: self._note_end(*end))

    def end_training(self) -> None:
        """Wait until all ranks have had their last batch. Collective.

        Raises:
            ExchangeError: a rank is lost, raised an error, or did not end training in `timeout` seconds.
        """
        self.end_batches()
        wait_for_ranks(self._all_ended.wait, "the end of training", self.timeout)
        self._all_ended.clear()
        self._trainings += 1

    def terminate(self) -> None:
        """Note a SIGTERM: this process ends after its step; a wait for other ranks soon ends with an error."""
        self._terminated = self._terminated or time.monotonic()

    def close(self) -> None:
        """Tell the other ranks that this rank ends without an error."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end_with_process)
        deactivate(self)
        self._submit(self._say_goodbye)
        # On rank 0 the thread runs on: it serves the other ranks until they, or this process, end.
        self._said_goodbye.wait(self.answer_timeout)

    def close_sockets(self) -> None:
        """Close all sockets. A forked child does this too: its copies would hide the death of the parent."""
        for connection in [one.socket for one in self._connections.values()] + [self._wake, self._woken]:
            connection.close()

    def _end_with_process(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception that ends this process, if one does
        if error is not None:
            self.announce(error)
        self.close()

    def _await_verdict(self) -> None:
        deadline = time.monotonic() + 3 * self.answer_timeout
        while not self._known.wait(self.answer_timeout / 10) and time.monotonic() < deadline:
            if self._silent == 0:
                self._submit(lambda: self._tell_all(Verdict(0, SILENT)))

    def _error(self, verdict: Verdict, cause: str) -> ExchangeError:
        if verdict.rank is None:
            return ExchangeError(f"{cause or 'an exchange failed'}; {verdict.why}")
        if verdict.why == ENDED and f"rank {verdict.rank} " in cause:
            return ExchangeError(cause)
        if verdict.rank == self.rank and verdict.announced:
            return ExchangeError(
                f"the other ranks did not come to a collective call that this rank ({self.rank}) made as it ended: "
                f"{verdict.why}"
            )
        if verdict.rank == self.rank:
            return ExchangeError(f"the other ranks expelled this rank ({self.rank}): {verdict.why}")
        return PeerLost(verdict.rank, verdict.why)

    @property
    def _waiting_since(self) -> float | None:
        """Start time of the longest current wait for other ranks, on any thread; None if there is none."""
        # A copy, because other threads change the dictionary meanwhile.
        return min(self._waits.copy().values(), default=None)

    def _break_off(self) -> None:
        """Note that this rank broke off an exchange, and tell rank 0."""
        if self._broken_off or self._closed:
            return
        self._broken_off = True
        if self._inquiry is None:
            self._submit(lambda: self._connections[0].send({"broke off": True}))

    def _give_up(self) -> None:
        """Break off this call. If that ends rank 0's hooks, tell the ranks that let it finish them."""
        self._break_off()
        if self._inquiry is not None and self._failing:
            # What a hook raises skips Lightning's teardown, so this rank may not close while its process lives.
            self._submit(lambda: self._send_all({"broke off": True}))

    def _submit(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        with suppress(OSError):
            self._wake.send(b"\0")

    # Methods for the detector's thread

    def _serve(self) -> None:
        while not self._over:
            asked = self._inquiry is not None and self._inquiry.requested and self.verdict is None
            for key, _ in self._selector.select(self.answer_timeout / 10 if asked else None):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.data.lost is None:
                    self._read(key.data)
            while self._calls:
                self._calls.popleft()()
            if self._inquiry is not None:
                if self.verdict is None and (found := self._inquiry.verdict(time.monotonic())):
                    self._tell_all(found)
                self._over = self._over or (self._closed and not self._inquiry.present)
        self.close_sockets()
        self._selector.close()

    def _read(self, connection: _Connection) -> None:
        for message in connection.read():
            self._handle(connection, message)
        if connection.lost is not None:
            self._gone = self._gone or time.monotonic()
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._lose(connection.rank, connection.lost)

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        self._unanswered = None
        rank = connection.rank
        match message:
            case {"ping": _}:
                since = self._waiting_since
                connection.send({"waiting": None if since is None else time.monotonic() - since})
            case {"waiting": seconds} if self._inquiry is not None:
                self._inquiry.answered(rank, seconds)
            case {"request": late} if self._inquiry is not None:
                if self.verdict is not None:
                    connection.send({"verdict": [*self.verdict]})
                self._request(bool(late), rank)
            case {"prepare": _} if self._inquiry is not None:
                connection.send({"alive": True})
                self._ping_all()
            case {"verdict": [int() | None as culprit, str() as why, bool() as announced]}:
                (self._accept if self._inquiry is None else self._tell_all)(Verdict(culprit, why, announced))
            case {"broke off": _} if self._inquiry is not None:
                self._broken_off = True
            case {"broke off": _}:
                self._gone = self._gone or time.monotonic()
            case {"ended": [int(), int() as training, int() as batches]} if self._inquiry is not None:
                self._note_end(rank, training, batches)
            case {"ended": [int() as first, int() as training, int() as batches]}:
                self._ends[first] = (training, batches)
            case {"all ended": _}:
                self._all_ended.set()
            case {"leave": _}:
                self._gone = self._gone or time.monotonic()
                if self._inquiry is not None:
                    self._inquiry.leave(rank)
                self._first_left = rank == 0

    def _ping_all(self) -> None:
        if self._inquiry is None:
            self._ask_first({"prepare": True})
            return
        for rank in self._inquiry.ranks_to_ping(time.monotonic()):
            self._connections[rank].send({"ping": True})

    def _ask_for_life(self) -> None:
        """Ask those that this rank is connected to for a sign of life, unless they owe one."""
        if self._inquiry is not None:
            self._ping_all()
        elif self._unanswered is None:
            self._ask_first({"ping": True})

    def _request(self, late: bool, rank: int = 0) -> None:
        """Ask for a verdict in the name of ``rank``."""
        if self.verdict is not None:
            return
        if self._inquiry is not None:
            self._ping_all()
            self._inquiry.answered(0, None if self._waiting_since is None else 0.0)
            self._inquiry.request(time.monotonic(), late, rank)
        elif self._first_left:
            self._accept(Verdict(0, ENDED))
        else:
            self._ask_first({"request": late})

    def _ask_first(self, message: dict[str, Any]) -> None:
        """Send rank 0 a message that it must answer."""
        self._unanswered = self._unanswered or time.monotonic()
        self._connections[0].send(message)

    def _lose(self, rank: int, why: str) -> None:
        if self._inquiry is not None:
            lost = rank in self._inquiry.present
            self._inquiry.forget(rank)
            if lost:
                self._tell_all(Verdict(rank, why))
        elif not self._first_left:
            self._accept(Verdict(0, why))

    def _tell_all(self, verdict: Verdict) -> None:
        """Accept this verdict and pass it on, unless there already is one."""
        if self.verdict is not None:
            return
        self._accept(verdict)
        self._send_all({"verdict": [*verdict]})

    def _send_all(self, message: dict[str, Any]) -> None:
        """Send a message on all connections that are not lost."""
        for connection in self._connections.values():
            if connection.lost is None:
                connection.send(message)

    def _accept(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._known.set()

    def _note_end(self, rank: int, training: int, batches: int) -> None:
        """Note that a rank has had its last batch. Rank 0 tells all ranks which has the fewest, and when all have."""
        if self._inquiry is None:
            self._connections[0].send({"ended": [rank, training, batches]})
            return
        # A rank with a further batch may have launched it, and end before one that lacks it.
        least = min((count for theirs, count in self._ends.values() if theirs == training), default=math.inf)
        self._ends[rank] = (training, batches)
        if batches < least:
            self._send_all({"ended": [rank, training, batches]})
        if sum(theirs == training for theirs, _ in self._ends.values()) == 1 + len(self._connections):
            self._send_all({"all ended": True})
            self._all_ended.set()

    def _say_goodbye(self) -> None:
        self._send_all({"leave": True})
        self._over = self._inquiry is None or not self._inquiry.present
        self._said_goodbye.set()


_detectors: WeakSet[FailureDetector] = WeakSet()


def open_failure_detector(
    group: dist.ProcessGroup | None, timeout: float, address: str | None = None
) -> FailureDetector | None:
    """Open the failure detector of this rank; collective. Returns None if the group has one rank only.

    While the detector is open, every failed wait of this process for a collective call on CPUs, of any caller, ends
    with an `ExchangeError` that names the rank at fault.

    Args:
        group: the ranks; None is the default group.
        timeout: seconds that ranks wait for each other.
        address: the address on which this rank listens meanwhile; None takes `own_address`.

    Raises:
        ExchangeError: ranks cannot connect to each other.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return None
    edges = [(0, other) for other in range(1, size)]
    return FailureDetector(rank, connect_pairs(edges, group, address, min(timeout, CONNECT_TIMEOUT)), timeout)


def _after_fork() -> None:
    for detector in list(_detectors):
        detector.close_sockets()


os.register_at_fork(after_in_child=_after_fork)
