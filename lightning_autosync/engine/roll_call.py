"""Who has come, before torch's process group forms, and who was lost while it did: errors name ranks, not store keys.

Ranks sign in at the store by which the group forms. One of them, the last to come or the first whose time is over,
writes the result there for all.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from lightning_autosync.engine.lifeline import SLICE
from lightning_autosync.engine.store import find_store
from lightning_autosync.errors import AutoSyncError, ExchangeError

_LINGER = 3.0
"""Seconds, at most, that rank 0, which holds the store, stays for the others to read the result."""
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torch: "True" where a launcher holds the store, for all attempts."""

_rounds = count(1)
"""Of this process: a script may form a group several times."""


class Meeting(NamedTuple):
    """Where and how ranks meet.

    Attributes:
        host: rank 0's.
        port: that its store has.
        rank: this process's.
        size: how many there are.
        timeout: seconds that ranks wait for each other.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float


@contextmanager
def roll_call(meeting: Meeting) -> Iterator[None]:
    """Around the forming of the process group, and what ranks do until they watch each other; collective.

    Nothing where there is one rank, a group, or a launcher that holds the store and watches the processes.

    Raises:
        ExchangeError: a rank did not come in time, came twice, or was lost meanwhile; it is named.
    """
    if meeting.size == 1 or dist.is_initialized() or os.environ.get(_AGENT) == str(True):
        yield
        return
    roll = _Roll(meeting)
    roll.call("came", "did not come", meeting.timeout)
    try:
        yield
    except AutoSyncError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        # Whoever still waits for the one that is lost fails when its time is over.
        roll.call("failed", "was lost while the process group formed", meeting.timeout + _LINGER)
        raise ExchangeError(
            f"the process group could not form, though no rank is lost: {_first_line(cause)}"
        ) from cause


class _Roll:
    """The store as this rank sees it."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._name = secrets.token_hex(16)
        self._store = dist.PrefixStore(f"autosync/roll/{next(_rounds)}", self._open())

    def call(self, what: str, fault: str, patience: float) -> None:
        """Wait for all to answer ``what``.

        Raises:
            ExchangeError: some did not; ``fault`` tells that.
        """
        try:
            told = self._answer(what, patience)
        except RuntimeError as cause:
            raise ExchangeError(f"rank 0 is lost: its store does not answer any more ({_first_line(cause)})") from cause
        if told["twice"] is not None:
            raise ExchangeError(
                f"two processes came as rank {told['twice']}{_missing(told['missing'], '; so far, ', fault)}: each "
                "process of a job needs a RANK of its own, and each job a MASTER_PORT of its own"
            )
        if told["missing"]:
            raise ExchangeError(f"{_missing(told['missing'], '', fault)} (in {patience:g} s)")

    def _answer(self, what: str, patience: float) -> dict[str, object]:
        store, rank, size = self._store, self._meeting.rank, self._meeting.size
        deadline = time.monotonic() + patience
        result = f"{what}/result"
        second = store.compare_set(f"{what}/{rank}", "", self._name).decode() != self._name
        if second:
            self._tell(what, twice=rank)
        elif store.add(f"{what}/count", 1) == size:
            self._tell(what)
        while not _there(store, result, max(SLICE, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                self._tell(what)
        told: dict[str, object] = json.loads(store.get(result))
        store.add(f"{what}/read", 1)
        if told["missing"]:
            self._linger(what, size if told["twice"] is not None else store.add(f"{what}/count", 0))
        return {**told, "twice": rank} if second else told

    def _tell(self, what: str, twice: int | None = None) -> None:
        """Let this be the result, unless there is one."""
        missing = [rank for rank in range(self._meeting.size) if not self._store.check([f"{what}/{rank}"])]
        self._store.compare_set(f"{what}/result", "", json.dumps({"missing": missing, "twice": twice}))

    def _linger(self, what: str, readers: int) -> None:
        """On rank 0: its store ends with it."""
        end = time.monotonic() + _LINGER
        while self._meeting.rank == 0 and self._store.add(f"{what}/read", 0) < readers and time.monotonic() < end:
            time.sleep(SLICE / 4)

    def _open(self) -> dist.TCPStore:
        meeting = self._meeting
        if meeting.rank == 0:
            # Where another process has the port, it may be a second one of this rank.
            with suppress(dist.DistNetworkError):
                return dist.TCPStore(
                    meeting.host,
                    meeting.port,
                    meeting.size,
                    is_master=True,
                    timeout=timedelta(seconds=meeting.timeout),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
        try:
            return find_store(meeting.host, meeting.port, meeting.timeout, waiting=meeting.timeout)
        except (ConnectionError, ExchangeError) as cause:  # where it was killed, its port may still take calls
            raise ExchangeError(
                f"rank 0 did not come (in {meeting.timeout:g} s), or is lost: no store of its is at MASTER_ADDR, "
                f"MASTER_PORT: {cause}"
            ) from None


def _there(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether the store has it, after a wait.

    One long wait, for torch prints warnings for each that is over; in a thread, for it hears no Ctrl-C.
    """
    found: list[bool | RuntimeError] = []

    def wait() -> None:
        try:
            store.wait([key], timedelta(seconds=seconds))
            found.append(True)
        except dist.DistStoreError:
            found.append(False)
        except RuntimeError as cause:
            found.append(cause)

    waiter = threading.Thread(target=wait, name="autosync-roll", daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(SLICE)
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def _missing(ranks: object, before: str, fault: str) -> str:
    assert isinstance(ranks, list)
    if not ranks:
        return ""
    return f"{before}rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {fault}"


def _first_line(cause: BaseException) -> str:
    return str(cause).splitlines()[0]
