"""TCP and Unix connections between pairs of ranks: how they are opened, and how they are tuned."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_autosync.engine.authentication import Acceptor, Caller, connect_with_retries
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import ExchangeError

CONNECT_TIMEOUT = 120.0
"""Seconds, at most, for all ranks to connect."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a caller may take to identify itself; handshakes run side by side."""
_POLL_INTERVAL = 0.1
"""Seconds between looks at this rank's own calls."""
_UNSENT_LIMIT = 64 * 1024
"""Bytes that the kernel may hold unsent, so that urgent frames do not queue behind megabytes."""
_SLACK = 2e-3
"""Seconds of sending that may be under way beyond the round trip: a busy host answers late."""
_SMALLEST_WINDOW = 64 * 1024
_MAX_PACING_RATE = 47
"""Linux's SO_MAX_PACING_RATE, which the ``socket`` module does not name."""
_ROUND_TRIP_OFFSET = 68
"""Where ``struct tcp_info`` keeps the smoothed round trip, in microseconds."""


def own_address() -> str:
    """The address under which the other ranks reach this one: the one that faces the job's rendezvous."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as cause:
        raise ExchangeError(f"no route to MASTER_ADDR={master}: {cause}; give the cluster's nodes an address") from None


def connect_pairs(
    edges: Iterable[tuple[int, int]],
    group: dist.ProcessGroup | None,
    address: str | None,
    timeout: float,
) -> dict[int, socket.socket]:
    """Open one connection for every pair of ranks, collectively; returns this rank's, by peer, blocking.

    The higher rank of a pair listens on its own address, the lower one connects. Both prove that they know a secret
    that rank 0 has drawn and handed out over the group; see `authentication`.

    Args:
        edges: pairs of ranks, lower first.
        group: the ranks; None is the default group.
        address: where this rank listens; None takes `own_address`, and one that begins with NUL is a name in Linux's
            abstract socket namespace, under which the ranks of one machine find it.
        timeout: seconds, at most, until all are connected.

    Raises:
        ExchangeError: on every rank if one cannot listen; or a peer could not be reached in ``timeout`` seconds.
    """
    rank = dist.get_rank(group)
    edges = sorted(edges)
    deadline = time.monotonic() + timeout
    with ExitStack() as cleanup:
        listener, fault = None, ""
        try:
            listener = cleanup.enter_context(listen(address or own_address()))
        except (OSError, ExchangeError) as cause:
            fault = str(cause)
        own = _endpoint(listener) if listener is not None else None
        offers = gather_json([own, fault, secrets.token_hex(32) if rank == 0 else ""], group)
        for other, (_, problem, _) in enumerate(offers):
            if problem:
                raise ExchangeError(f"rank {other} cannot listen for its peers: {problem}")
        assert listener is not None
        connector = _Connector(
            listener,
            secret=str(offers[0][2]).encode(),
            rank=rank,
            callers={low for low, high in edges if high == rank},
            deadline=deadline,
        )
        cleanup.callback(connector.close)
        sockets = connector.run({high: offers[high][0] for low, high in edges if low == rank})
    for connection in sockets.values():
        connection.setblocking(True)
    return sockets


class _Connector:
    """Calls a rank's peers and accepts their calls, side by side.

    Args:
        listener: where peers call.
        secret: that all ranks know.
        rank: this rank.
        callers: ranks that will call.
        deadline: for all, in seconds of `time.monotonic`.
    """

    def __init__(self, listener: socket.socket, secret: bytes, rank: int, callers: set[int], deadline: float) -> None:
        self._secret, self._rank, self._callers, self._deadline = secret, rank, callers, deadline
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, self._selector, secret, _HANDSHAKE_TIMEOUT, self._admit)
        self._sockets: dict[int, socket.socket] = {}
        self._over = False

    def run(self, targets: dict[int, list[Any]]) -> dict[int, socket.socket]:
        """Call ``targets`` and wait for the callers; returns all connections, which the caller then owns.

        Raises:
            ExchangeError: one is missing at the deadline.
        """
        with ThreadPoolExecutor(max(1, len(targets))) as threads:
            calls = {peer: threads.submit(self._call, target, peer) for peer, target in targets.items()}
            try:
                self._await_callers(calls)
                for peer, call in calls.items():
                    self._sockets[peer] = call.result()
            except BaseException:
                self._over = True
                for call in calls.values():
                    call.add_done_callback(_close_result)
                raise
        sockets, self._sockets = self._sockets, {}
        return sockets

    def close(self) -> None:
        """Accept no more calls, and close the connections that `run` has not returned."""
        self._acceptor.close()
        self._selector.close()
        for connection in self._sockets.values():
            connection.close()

    def _await_callers(self, calls: dict[int, Future[socket.socket]]) -> None:
        while missing := self._callers - self._sockets.keys():
            now = time.monotonic()
            for call in calls.values():
                if call.done():
                    call.result()
            if now > self._deadline:
                raise ExchangeError(f"no connection from rank {', '.join(map(str, sorted(missing)))} in time")
            for key, _ in self._selector.select(min(_POLL_INTERVAL, self._deadline - now)):
                key.data()
            self._acceptor.tick(now)

    def _admit(self, caller: Caller) -> None:
        try:
            peer = json.loads(caller.claim)
            if type(peer) is not int or peer not in self._callers:
                raise ValueError("it is not one of the ranks that call")
            caller.answer(b"")
        except (OSError, ValueError, RecursionError):
            caller.connection.close()
            return
        if peer in self._sockets:  # it calls again, because it did not get the answer
            self._sockets[peer].close()
        self._sockets[peer] = caller.connection

    def _call(self, target: list[Any], peer: int) -> socket.socket:
        claim = json.dumps(self._rank).encode()
        try:
            found = connect_with_retries(target, self._secret, claim, self._deadline, lambda: self._over)
        except OSError as cause:
            place = ":".join(map(str, target)).lstrip("\0")
            raise ExchangeError(f"rank {peer} cannot be reached at {place}: {cause}") from None
        if found is None:
            raise ExchangeError(f"the call to rank {peer} was cancelled")
        return found[0]


def _close_result(call: Future[socket.socket]) -> None:
    if not call.cancelled() and call.exception() is None:
        call.result().close()


def _endpoint(listener: socket.socket) -> list[Any]:
    """Where peers connect to: host and port, or the name of a Unix socket."""
    name = listener.getsockname()
    return [name.decode()] if isinstance(name, bytes) else list(name[:2])


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``address`` only, with as long a queue as the system allows.

    Args:
        address: of this machine; or with a NUL in front a name in Linux's abstract socket namespace.
        port: 0 takes a free one.

    Raises:
        ExchangeError: the address is not this machine's, or the port is taken.
    """
    if address.startswith("\0"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        return listener
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            raise ExchangeError(f"{address}: port {port} is taken by another process") from None
        raise ExchangeError(f"{address}: {cause}; a node's address in the cluster is the node's own") from None


def tune_connection(connection: socket.socket, rate: float | None, pace: float | None = None) -> None:
    """Make a connection ready for frames: non-blocking, no delay, short queues.

    Args:
        connection: a connected TCP socket.
        rate: bytes/s of the route, if known. Then the send buffer is no larger than what the route and a little slack
            hold. Reductions and broadcasts share every link, and data that queues in one direction of a link delays
            the acknowledgements of the other direction. None leaves the size to the kernel.
        pace: payload bytes/s that the kernel must not exceed (the first packet after a pause leaves at once). Only
            Linux can do this; elsewhere it has no effect.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_LIMIT)
    round_trip = _round_trip(connection)
    if rate is not None and round_trip is not None:
        window = max(_SMALLEST_WINDOW, int(rate * (2 * round_trip + _SLACK)))
        # Above its limit the kernel would keep less under way than the route holds; it does better by itself then.
        if window <= _largest_buffer():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
    if pace is not None and sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", round(pace)))


def _largest_buffer() -> float:
    """Bytes up to which the kernel takes a send buffer's size as it is asked for."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):
        return math.inf


def _round_trip(connection: socket.socket) -> float | None:
    """Seconds, as the kernel saw them while connecting; None where it does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_OFFSET + 4)
    if len(info) < _ROUND_TRIP_OFFSET + 4:
        return None
    return float(struct.unpack_from("=I", info, _ROUND_TRIP_OFFSET)[0]) * 1e-6
