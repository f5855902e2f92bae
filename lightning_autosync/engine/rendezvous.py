"""The rendezvous of ranks: torch's TCP stores, and errors that name missing ranks when its process group forms.

Stores listen on one address only, wherever it can be known, and searches for them respect their timeout. All ranks sign
in at the store that the process group uses. The last rank to arrive, or the first to reach its timeout, writes the
result there for all. Errors therefore name ranks instead of keys of a store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from itertools import count
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from lightning_autosync.engine.connections import listen, listen_at, own_address
from lightning_autosync.engine.waiting import SLICE
from lightning_autosync.errors import AutoSyncError, ExchangeError

T = TypeVar("T")

ANSWER_TIMEOUT = 10.0
"""Seconds in which a store answers even on a busy host, because its thread runs no Python."""
_RETRY = 0.2
"""Seconds between attempts to connect."""
_LINGER = 3.0
"""Longest time in seconds that rank 0, which holds the store, waits for the others to read the result."""
_LINGER_FOR_LATE = 30.0
"""The same if two processes came as one rank: other ranks may not have arrived yet."""
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torch: "True" if the launcher holds the store, across restarts."""

_rounds = count(1)
"""Numbers of the process groups that this process forms, one after another; they keep the groups' keys apart."""


class Rendezvous(NamedTuple):
    """Address and size of a job.

    Attributes:
        host: rank 0's host.
        port: TCP port of rank 0's store.
        rank: rank of this process.
        size: number of ranks.
        timeout: seconds that ranks wait for each other.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float


@contextmanager
def checked_rendezvous(rendezvous: Rendezvous) -> Iterator[None]:
    """Check that all ranks arrive, around the code from forming the process group to opening a `FailureDetector`.

    Collective. It does nothing for a single rank, if a group exists already, or if a launcher holds the store and
    watches the processes.

    Raises:
        ExchangeError: a rank did not come in time, came twice, or was lost meanwhile; the error names it.
    """
    if rendezvous.size == 1 or dist.is_initialized() or os.environ.get(_AGENT) == str(True):
        yield
        return
    sign_in = _SignIn(rendezvous)
    sign_in.wait_for_all("came", "did not join", rendezvous.timeout)
    try:
        yield
    except AutoSyncError:
        raise
    except RuntimeError as cause:
        if not isinstance(cause, dist.DistError) and "gloo" not in str(cause).lower():
            raise
        # Other ranks may still wait for the lost one, and sign in here only when their own timeout is over.
        sign_in.wait_for_all("failed", "was lost while the process group formed", rendezvous.timeout + _LINGER)
        raise ExchangeError(
            f"the process group could not be created, although no rank is lost: {_first_line(cause)}"
        ) from cause


class _SignIn:
    """This rank's sign-in at the store."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._name = secrets.token_hex(16)
        self._holds_store = False
        self._store = dist.PrefixStore(f"autosync/roll/{next(_rounds)}", self._open())

    def wait_for_all(self, what: str, fault: str, timeout: float) -> None:
        """Sign in under ``what``, and wait until all ranks have signed in.

        Raises:
            ExchangeError: some ranks did not; the error puts ``fault`` after their names.
        """
        longest = timeout + (_LINGER_FOR_LATE if self._holds_store else 0.0)
        try:
            result = ask_store(lambda: self._sign_in(what, timeout), longest)
        except RuntimeError as cause:
            raise ExchangeError(f"rank 0 is lost: its store does not answer any more ({_first_line(cause)})") from cause
        if result["twice"] is not None:
            raise ExchangeError(
                f"two processes have rank {result['twice']}{_missing(result['missing'], '; so far, ', fault)}: each "
                "process of a job needs its own RANK, and each job its own MASTER_PORT"
            )
        if result["missing"]:
            raise ExchangeError(f"{_missing(result['missing'], '', fault)} within {timeout:g} s")
        if result["taken"]:
            host, port = self._rendezvous.host, self._rendezvous.port
            raise ExchangeError(
                f"rank 0 cannot open its store: another process uses port {port} of {host}; each job needs its own "
                "MASTER_PORT"
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
        with suppress(RuntimeError):  # the process that holds the store may already have ended
            store.add(f"{what}/read", 1)
        if self._holds_store and result["twice"] is not None:
            self._linger(what, size, min(timeout, _LINGER_FOR_LATE))
        elif self._holds_store and result["missing"]:
            self._linger(what, store.add(f"{what}/count", 0), _LINGER)
        return {**result, "twice": rank} if second else result

    def _write_result(self, what: str, twice: int | None = None) -> None:
        """Write the result of the sign-in, unless another rank already has."""
        missing = [rank for rank in range(self._rendezvous.size) if not self._store.check([f"{what}/{rank}"])]
        result = {"missing": missing, "twice": twice, "taken": self._store.check([f"{what}/taken"])}
        self._store.compare_set(f"{what}/result", "", json.dumps(result))

    def _linger(self, what: str, readers: int, seconds: float) -> None:
        """Keep the store of this process open until ``readers`` ranks have read the result, or ``seconds`` are over."""
        end = time.monotonic() + seconds
        while self._store.add(f"{what}/read", 0) < readers and time.monotonic() < end:
            time.sleep(SLICE / 4)

    def _open(self) -> dist.TCPStore:
        rendezvous = self._rendezvous
        if rendezvous.rank == 0:
            # If the port is taken, the process that has it may be another one with rank 0: sign in there, to find out.
            with suppress(ExchangeError, dist.DistNetworkError):
                store = _open_first(rendezvous)
                self._holds_store = True
                return store
        try:
            return find_store(rendezvous.host, rendezvous.port, rendezvous.timeout, waiting=rendezvous.timeout)
        except (ConnectionError, ExchangeError) as cause:  # the port of a killed process may still accept connections
            raise ExchangeError(
                f"rank 0 did not join within {rendezvous.timeout:g} s, or is lost: there is no store at "
                f"MASTER_ADDR:MASTER_PORT: {cause}"
            ) from None


def _is_there(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether the store has ``key``; waits for it for at most ``seconds``.

    This is a single long wait, because torch prints a warning for each wait that times out.
    """
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True


def _missing(ranks: object, before: str, fault: str) -> str:
    assert isinstance(ranks, list)
    if not ranks:
        return ""
    return f"{before}rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {fault}"


def _first_line(cause: BaseException) -> str:
    return str(cause).splitlines()[0]


def open_store(address: str, port: int, timeout: float) -> dist.TCPStore:
    """A store that listens on ``address`` only; if this process already has a store at ``port``, that store.

    Args:
        address: an address or a name of this machine.
        port: TCP port; 0 takes a free one (see `ports`).
        timeout: seconds that a wait at the store may take.

    Raises:
        ExchangeError: the address is not this machine's, another process has the port, or no port is free.
    """
    address = _numeric(address)
    try:
        listener = listen(address, port)
    except ExchangeError as taken:
        return _open_again(address, port, timeout, taken)
    bound = listener.getsockname()[1]
    return _store(address, bound, timeout, listener.detach())


def _open_again(address: str, port: int, timeout: float, taken: ExchangeError) -> dist.TCPStore:
    """The store that an earlier process group of this process may still hold; torch finds it by its port."""
    if not port:
        raise taken
    with listen_at(address, 0) as other:  # which nobody calls
        try:
            # If there is no such store, torch takes this socket, and fails because the socket has another port.
            return _store(address, port, timeout, other.fileno())
        except RuntimeError:
            other.detach()
            raise taken from None


def _store(address: str, port: int, timeout: float, descriptor: int | None) -> dist.TCPStore:
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
    """The store that listens at ``host`` and ``port``.

    Args:
        host: name or address of the store's host.
        port: the store's TCP port.
        timeout: seconds that a later wait at the store may take.
        waiting: seconds to wait for a listener.

    Raises:
        ConnectionError: nothing listens there in time.
        ExchangeError: the listener does not answer like a store.
    """
    _await_listener(host, port, waiting)
    try:
        answer = ask_store(lambda: _connect(host, port))
    except RuntimeError as cause:
        raise ExchangeError(
            f"no store at {host}:{port}: another program listens there ({_first_line(cause)})"
        ) from None
    answer.set_timeout(timedelta(seconds=timeout))
    return answer


def ask_store(call: Callable[[], T], longest: float = 0.0) -> T:
    """The result of ``call``, which asks a store.

    It runs in a thread, because torch waits for a store's answers without a timeout, and Ctrl-C cannot interrupt it.
    Where the process that holds the store is stopped, the thread is left behind, and its store is of no further use.

    Args:
        call: a call, or several, of a store's methods.
        longest: seconds that the calls may wait for other ranks.

    Raises:
        ExchangeError: the store did not answer within `ANSWER_TIMEOUT` after ``longest``.
        RuntimeError: the call failed.
    """
    answer: Future[T] = Future()
    asking = threading.Thread(target=_ask, args=(call, answer), name="autosync-store", daemon=True)
    asking.start()
    asking.join(longest + ANSWER_TIMEOUT)
    if not answer.done():
        raise ExchangeError(f"no answer from the store in {longest + ANSWER_TIMEOUT:g} s")
    return answer.result()


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


def _connect(host: str, port: int) -> dist.TCPStore:
    timeout = timedelta(seconds=ANSWER_TIMEOUT)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _ask(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as cause:
        answer.set_exception(cause)


def _open_first(rendezvous: Rendezvous) -> dist.TCPStore:
    """Rank 0's store. Torch's process group takes it, and opens none of its own, which would listen on all addresses.

    Raises:
        ExchangeError: (or a ``DistNetworkError``) another process has the port.
    """
    host, port, _, _, timeout = rendezvous
    addresses = _await_addresses(host, timeout)
    if host not in {"localhost", *addresses} and all(ip_address(address).is_loopback for address in addresses):
        # Debian gives a machine's own name a loopback address, but other machines know it by an address that cannot be
        # told from here. The store therefore listens on all.
        return _store(host, port, timeout, None)
    return open_store(_own_one(addresses), port, timeout)


def _own_one(addresses: list[str]) -> str:
    """The first of the addresses that is this machine's.

    If none is, they are of a service or a gateway, which forwards to the address of the route to it.
    """
    for address in addresses:
        with suppress(OSError):
            listen_at(address, 0).close()
            return address
    return own_address()


def _await_addresses(host: str, waiting: float) -> list[str]:
    """`_numeric_addresses`, which Kubernetes announces some time after it has started the process."""
    deadline = time.monotonic() + waiting
    while True:
        try:
            return _numeric_addresses(host)
        except ExchangeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY)


def _numeric(address: str) -> str:
    """The numeric form of an address or a host name."""
    return _numeric_addresses(address)[0]


def _numeric_addresses(address: str) -> list[str]:
    """The numeric forms of an address or a host name, most suitable first."""
    try:
        return [str(place[0]) for *_, place in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except OSError as cause:
        raise ExchangeError(f"{address}: {cause}; set `address` for each node of the cluster") from None
