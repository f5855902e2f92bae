"""Torch's TCP stores: opened on one address only, and found without waiting longer than asked for."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_autosync.engine.connections import listen
from lightning_autosync.errors import ExchangeError

ANSWER_TIMEOUT = 10.0
"""Seconds in which a store answers, however busy its host is: its thread runs no Python."""
_RETRY = 0.2
"""Seconds between looks whether anything listens."""


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
