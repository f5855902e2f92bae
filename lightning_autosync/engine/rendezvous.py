"""How ranks come together: torch's TCP stores, and which ranks are missing when its process group forms.

Stores are opened on one address only, and found without waiting longer than asked for. All ranks sign in at the store
by which the group forms. One of them, the last to come or the first that reaches its time-out, writes the result there
for all. So errors name ranks, not keys of a store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from lightning_autosync.engine.connections import listen
from lightning_autosync.engine.waiting import SLICE
from lightning_autosync.errors import AutoSyncError, ExchangeError

ANSWER_TIMEOUT = 10.0
"""Seconds in which a store answers, however busy its host is: its thread runs no Python."""
_RETRY = 0.2
"""Seconds between looks whether anything listens."""
_LINGER = 3.0
"""Seconds, at most, that rank 0, which holds the store, stays for the others to read the result."""
_LINGER_FOR_LATE = 30.0
"""The same where not all have come yet, because two processes came as one rank."""
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torch: "True" where a launcher holds the store, for all attempts."""

_rounds = count(1)
"""Numbers the groups that this process forms: a script may form several."""


class Rendezvous(NamedTuple):
    """Where and how ranks come together.

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
def checked_rendezvous(rendezvous: Rendezvous) -> Iterator[None]:
    """Put it around the forming of the process group, up to where a `FailureDetector` is open; collective.

    It does nothing for one rank, where a group exists already, or where a launcher holds the store and watches the
    processes.

    Raises:
        ExchangeError: a rank did not come in time, came twice, or was lost meanwhile; the error names it.
    """
    if rendezvous.size == 1 or dist.is_initialized() or os.environ.get(_AGENT) == str(True):
        yield
        return
    sign_in = _SignIn(rendezvous)
    sign_in.wait_for_all("came", "did not come", rendezvous.timeout)
    try:
        yield
    except AutoSyncError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        # A rank that still waits for the lost one fails at its own time-out.
        sign_in.wait_for_all("failed", "was lost while the process group formed", rendezvous.timeout + _LINGER)
        raise ExchangeError(
            f"the process group could not form, though no rank is lost: {_first_line(cause)}"
        ) from cause


class _SignIn:
    """This rank's access to the store."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._name = secrets.token_hex(16)
        self._holds_store = False
        self._store = dist.PrefixStore(f"autosync/roll/{next(_rounds)}", self._open())

    def wait_for_all(self, what: str, fault: str, timeout: float) -> None:
        """Sign in under ``what``, and wait until all ranks have.

        Raises:
            ExchangeError: some have not; ``fault`` says so.
        """
        try:
            result = self._sign_in(what, timeout)
        except RuntimeError as cause:
            raise ExchangeError(f"rank 0 is lost: its store does not answer any more ({_first_line(cause)})") from cause
        if result["twice"] is not None:
            raise ExchangeError(
                f"two processes came as rank {result['twice']}{_missing(result['missing'], '; so far, ', fault)}: each "
                "process of a job needs a RANK of its own, and each job a MASTER_PORT of its own"
            )
        if result["missing"]:
            raise ExchangeError(f"{_missing(result['missing'], '', fault)} (in {timeout:g} s)")
        if result["taken"]:
            host, port = self._rendezvous.host, self._rendezvous.port
            raise ExchangeError(
                f"rank 0 cannot open its store: another process has port {port} of {host}; each job needs a "
                "MASTER_PORT of its own"
            )

    def _sign_in(self, what: str, timeout: float) -> dict[str, object]:
        store, rank, size = self._store, self._rendezvous.rank, self._rendezvous.size
        deadline = time.monotonic() + timeout
        key = f"{what}/result"
        if rank == 0 and not self._holds_store:
            store.set(f"{what}/taken", self._name)
        second = store.compare_set(f"{what}/{rank}", "", self._name).decode() != self._name
        if second:
            self._write_result(what, twice=rank)
        elif store.add(f"{what}/count", 1) == size:
            self._write_result(what)
        while not _is_there(store, key, max(SLICE, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                self._write_result(what)
        result: dict[str, object] = json.loads(store.get(key))
        with suppress(RuntimeError):  # who holds the store may end once it has this
            store.add(f"{what}/read", 1)
        if self._holds_store and result["twice"] is not None:
            self._linger(what, size, min(timeout, _LINGER_FOR_LATE))
        elif self._holds_store and result["missing"]:
            self._linger(what, store.add(f"{what}/count", 0), _LINGER)
        return {**result, "twice": rank} if second else result

    def _write_result(self, what: str, twice: int | None = None) -> None:
        """Unless there is a result already."""
        missing = [rank for rank in range(self._rendezvous.size) if not self._store.check([f"{what}/{rank}"])]
        result = {"missing": missing, "twice": twice, "taken": self._store.check([f"{what}/taken"])}
        self._store.compare_set(f"{what}/result", "", json.dumps(result))

    def _linger(self, what: str, readers: int, seconds: float) -> None:
        """This process, which holds the store, stays until the others have read the result."""
        end = time.monotonic() + seconds
        while self._store.add(f"{what}/read", 0) < readers and time.monotonic() < end:
            time.sleep(SLICE / 4)

    def _open(self) -> dist.TCPStore:
        rendezvous = self._rendezvous
        if rendezvous.rank == 0:
            # A process that has the port already may be a second one with this rank.
            with suppress(dist.DistNetworkError):
                store = dist.TCPStore(
                    rendezvous.host,
                    rendezvous.port,
                    rendezvous.size,
                    is_master=True,
                    timeout=timedelta(seconds=rendezvous.timeout),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
                self._holds_store = True
                return store
        try:
            return find_store(rendezvous.host, rendezvous.port, rendezvous.timeout, waiting=rendezvous.timeout)
        except (ConnectionError, ExchangeError) as cause:  # after it was killed, its port may still accept
            raise ExchangeError(
                f"rank 0 did not come (in {rendezvous.timeout:g} s), or is lost: it has no store at MASTER_ADDR, "
                f"MASTER_PORT: {cause}"
            ) from None


def _is_there(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether the store has ``key``, after so many seconds at most.

    One long wait, because torch prints a warning for each that ends in vain. It runs in a thread, because it cannot be
    interrupted by Ctrl-C.
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

    waiter = threading.Thread(target=wait, name="autosync-rendezvous", daemon=True)
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


def open_store(address: str, port: int, timeout: float) -> dist.TCPStore:
    """A store that listens on ``address`` only; if this process has one at ``port`` already, that one.

    Args:
        address: of this machine, or a name of it.
        port: 0 takes a free one.
        timeout: seconds that a wait may take.

    Raises:
        ExchangeError: the address is not this machine's, or another process has the port.
    """
    address = _numeric(address)
    try:
        listener = listen(address, port)
    except ExchangeError as taken:
        return _open_again(address, port, timeout, taken)
    bound = listener.getsockname()[1]
    return _store(address, bound, timeout, listener.detach())


def _open_again(address: str, port: int, timeout: float, taken: ExchangeError) -> dist.TCPStore:
    """The store that a process group of an earlier training may still hold; torch finds it by its port."""
    if not port:
        raise taken
    with listen(address) as other:
        try:
            # If there is none, torch takes this socket, and notices that it has another port.
            return _store(address, port, timeout, other.fileno())
        except RuntimeError:
            other.detach()
            raise taken from None


def _store(address: str, port: int, timeout: float, descriptor: int) -> dist.TCPStore:
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
        use_libuv=True,
    )


def find_store(host: str, port: int, timeout: float, waiting: float = 0.0) -> dist.TCPStore:
    """The store that listens there.

    Args:
        timeout: seconds that a wait may take later on.
        waiting: seconds in which something must listen there.

    Raises:
        ConnectionError: nothing listens there in time.
        ExchangeError: what listens there does not answer as a store does.
    """
    _await_listener(host, port, waiting)
    found: list[dist.TCPStore | RuntimeError] = []
    # Torch waits for the first answer without a time-out, and cannot be interrupted.
    asking = threading.Thread(target=_ask, args=(host, port, found), name="autosync-store", daemon=True)
    asking.start()
    asking.join(ANSWER_TIMEOUT + 1.0)
    answer = found[0] if found else RuntimeError(f"no answer in {ANSWER_TIMEOUT:g} s")
    if isinstance(answer, RuntimeError):
        reason = str(answer).splitlines()[0]
        raise ExchangeError(f"no store at {host}:{port}: what listens there is something else ({reason})")
    answer.set_timeout(timedelta(seconds=timeout))
    return answer


def _await_listener(host: str, port: int, waiting: float) -> None:
    deadline = time.monotonic() + waiting
    while True:
        try:
            socket.create_connection((host, port), timeout=ANSWER_TIMEOUT).close()
            return
        except OSError as cause:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no store at {host}:{port}: {cause}") from None
        time.sleep(_RETRY)


def _ask(host: str, port: int, found: list[dist.TCPStore | RuntimeError]) -> None:
    timeout = timedelta(seconds=ANSWER_TIMEOUT)
    try:
        found.append(dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))
    except RuntimeError as cause:
        found.append(cause)


def _numeric(address: str) -> str:
    """The numeric form of an address of this machine, or of its name."""
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as cause:
        raise ExchangeError(f"{address}: {cause}; give the cluster's nodes an address") from None
