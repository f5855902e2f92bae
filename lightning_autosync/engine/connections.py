"""TCP and Unix connections between pairs of ranks: opening and tuning."""

from __future__ import annotations

import errno
import json
import math
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_autosync.engine.authentication import Acceptor, Caller, connect_with_retries
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.secret import common_secret
from lightning_autosync.engine.waiting import watched_wait
from lightning_autosync.errors import ExchangeError, OpeningError
from lightning_autosync.plan.pacing import UNSENT_LIMIT, Need, send_buffers
from lightning_autosync.ports import with_free_port

CONNECT_TIMEOUT = 120.0
"""Longest time in seconds for all ranks to connect."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds that one caller may take to identify itself; handshakes run concurrently."""
_POLL_INTERVAL = 0.1
"""Seconds between checks of this rank's own calls."""
_LARGEST_SEGMENT = 64 * 1024
"""Bytes of the largest segment that Linux puts together before it sends it."""
_MAX_PACING_RATE = 47
"""Linux's SO_MAX_PACING_RATE, which the ``socket`` module does not name."""
_ROUND_TRIP_OFFSET, _UNKNOWN_ROUND_TRIP = 148, 2**32 - 1
"""Byte offset of the least round-trip time, in microseconds, in ``struct tcp_info``, and its value before the first."""


def own_address() -> str:
    """The address of this host that other ranks can reach: that of the route to the job's rendezvous."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        # Connecting a UDP socket sends nothing, but the kernel then picks the route and with it the local address.
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as cause:
        raise ExchangeError(
            f"no route to MASTER_ADDR={master}: {cause}; set `address` for each node of the cluster"
        ) from None


def connect_pairs(
    edges: Iterable[tuple[int, int]],
    group: dist.ProcessGroup | None,
    address: str | None,
    timeout: float,
    interface: int = 0,
) -> dict[int, socket.socket]:
    """Open one connection for every pair of ranks; collective.

    The higher rank of a pair listens on its own address; the lower rank connects. Both prove that they know the
    ranks' secret; see `common_secret` and `authentication`.

    Args:
        edges: pairs of ranks, lower rank first.
        group: the ranks; None is the default group.
        address: the address on which this rank listens; None takes `own_address`. An address that begins with NUL is a
            name in Linux's abstract socket namespace, for ranks on one machine.
        timeout: seconds in which all ranks must connect.
        interface: the nodes' interface to which the addresses belong. Over others than the first, calls also leave from
            ``address``, so that both ends of a connection tell the routing tables its interface.

    Returns:
        This rank's connections, blocking, by peer.

    Raises:
        OpeningError: some rank cannot listen (raised on every rank).
        ExchangeError: ranks were given different secrets (raised on every rank), or a peer is lost or cannot be
            reached in time.
    """
    rank = dist.get_rank(group)
    edges = sorted(edges)
    deadline = time.monotonic() + timeout
    secret = common_secret(group)
    with ExitStack() as cleanup:
        listener, endpoints = _listen_together(cleanup, address, group, interface)
        connector = _Connector(
            listener,
            secret=secret,
            rank=rank,
            callers={low for low, high in edges if high == rank},
            deadline=deadline,
            interface=interface,
        )
        cleanup.callback(connector.close)
        sockets = connector.run({high: endpoints[high] for low, high in edges if low == rank})
    for connection in sockets.values():
        connection.setblocking(True)
    return sockets


def _listen_together(
    cleanup: ExitStack, address: str | None, group: dist.ProcessGroup | None, interface: int
) -> tuple[socket.socket, list[list[Any]]]:
    """This rank's listener, which ``cleanup`` closes, and the places at which all ranks listen; see `connect_pairs`."""
    listener, fault = None, ""
    try:
        listener = cleanup.enter_context(listen(address or own_address()))
    except (OSError, ExchangeError) as cause:
        fault = str(cause)
    own = _endpoint(listener) if listener is not None else None
    offers = gather_json([own, fault], group)
    for other, (_, problem) in enumerate(offers):
        if problem:
            raise OpeningError(f"rank {other} cannot listen for its peers{over(interface)}: {problem}")
    assert listener is not None
    return listener, [place for place, _ in offers]


class _Connector:
    """Connects to some of a rank's peers while it accepts connections from the others.

    Args:
        listener: the socket to which peers connect.
        secret: the secret that all ranks share.
        rank: this rank.
        callers: ranks that will connect to this one.
        deadline: latest time for all connections, as a time of `time.monotonic`.
        interface: interface of ``listener``.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        rank: int,
        callers: set[int],
        deadline: float,
        interface: int = 0,
    ) -> None:
        self._secret, self._rank, self._callers, self._deadline = secret, rank, callers, deadline
        self._over = over(interface)
        self._source = str(listener.getsockname()[0]) if interface else None
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, self._selector, secret, _HANDSHAKE_TIMEOUT, self._admit)
        self._sockets: dict[int, socket.socket] = {}
        self._cancelled = False

    def run(self, targets: dict[int, list[Any]]) -> dict[int, socket.socket]:
        """Connect to ``targets``, addresses by rank, and wait for the callers; returns all connections by rank.

        Raises:
            ExchangeError: a connection is missing at the deadline, or a rank is lost.
        """
        with ThreadPoolExecutor(max(1, len(targets))) as threads:
            calls = {peer: threads.submit(self._call, target, peer) for peer, target in targets.items()}
            try:
                with watched_wait() as check:
                    self._await_all(calls, check)
                for peer, call in calls.items():
                    self._sockets[peer] = call.result()
            except BaseException:
                self._cancelled = True
                for call in calls.values():
                    call.add_done_callback(_close_result)
                raise
        sockets, self._sockets = self._sockets, {}
        return sockets

    def close(self) -> None:
        """Accept no more connections, and close those that `run` has not returned."""
        self._acceptor.close()
        self._selector.close()
        for connection in self._sockets.values():
            connection.close()

    def _await_all(self, calls: dict[int, Future[socket.socket]], check: Callable[[], None]) -> None:
        """Wait until all callers have come, and this rank's own calls, which end at the deadline, have ended."""
        while (missing := self._callers - self._sockets.keys()) or not all(call.done() for call in calls.values()):
            check()
            now = time.monotonic()
            for call in calls.values():
                if call.done():
                    call.result()
            if missing and now > self._deadline:
                raise ExchangeError(
                    f"rank {', '.join(map(str, sorted(missing)))} did not connect to this rank{self._over} before the "
                    "timeout"
                )
            pause = max(0.0, min(_POLL_INTERVAL, self._deadline - now))
            if not missing:
                wait(calls.values(), _POLL_INTERVAL, FIRST_EXCEPTION)
                pause = 0.0  # but answer a caller that tries again
            for key, _ in self._selector.select(pause):
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
        if peer in self._sockets:  # the peer tries again, because it did not get the answer
            self._sockets[peer].close()
        self._sockets[peer] = caller.connection

    def _call(self, target: list[Any], peer: int) -> socket.socket:
        claim = json.dumps(self._rank).encode()
        try:
            found = connect_with_retries(
                target, self._secret, claim, self._deadline, lambda: self._cancelled, self._source
            )
        except OSError as cause:
            place = ":".join(map(str, target)).lstrip("\0")
            raise ExchangeError(f"rank {peer} cannot be reached{self._over} at {place}: {cause}") from None
        if found is None:
            raise ExchangeError(f"the call to rank {peer} was cancelled")
        return found[0]


def over(interface: int) -> str:
    """Words that name an interface in messages; empty for the first."""
    return f" over interface {interface}" if interface else ""


def _close_result(call: Future[socket.socket]) -> None:
    if not call.cancelled() and call.exception() is None:
        call.result().close()


def _endpoint(listener: socket.socket) -> list[Any]:
    """The address to which peers connect: host and port, or the name of a Unix socket."""
    name = listener.getsockname()
    return [name.decode()] if isinstance(name, bytes) else list(name[:2])


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``address`` only, with the longest accept queue that the system allows.

    Args:
        address: an address of this machine, or NUL and a name in Linux's abstract socket namespace.
        port: TCP port; 0 takes a free one, of the range of this process if it has one (see `ports`).

    Raises:
        ExchangeError: the address is not this machine's, the port is taken, or no port of the range is free.
    """
    if address.startswith("\0"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        return listener
    try:
        return listen_at(address, port) if port else with_free_port(partial(listen_at, address))
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            raise ExchangeError(f"{address}: port {port} is taken by another process") from None
        raise ExchangeError(f"{address}: {cause}; a node's `address` in the cluster must belong to that node") from None


def listen_at(address: str, port: int) -> socket.socket:
    """A socket that listens on ``address`` and ``port``, where 0 is any free port, of the range or not.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)


def tune_connection(
    connection: socket.socket, rates: tuple[float, float] | None, need: Need | None = None
) -> int | None:
    """Make a connection ready for frames: non-blocking, without Nagle's algorithm, with short queues.

    Args:
        connection: a connected TCP socket.
        rates: bytes/s on the wire of the route and of the route back, if known. They limit the send buffer to the
            bandwidth-delay product plus some slack. Reductions and broadcasts share every link, and data that queues in
            one direction of a link delays the acknowledgements of the other direction. None leaves the size to the
            kernel.
        need: what the connection needs of a route that it shares; None for all of it. The kernel enforces its pace
            (the first packet after a pause leaves at once), on Linux only.

    Returns:
        What `limit_queue` does.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_LIMIT)
    if need is not None and need.pace is not None and sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", round(need.pace)))
    return limit_queue(connection, rates, need)


def limit_queue(connection: socket.socket, rates: tuple[float, float] | None, need: Need | None = None) -> int | None:
    """Limit the send buffer to what the route holds, by the least round-trip time so far.

    A connection that is opened while gradients travel waits in the queues of their links. Its round trips then seem up
    to several hundred times as long as they are. After the first step the least one is that of an empty link.

    Args:
        connection: a connected TCP socket.
        rates: bytes/s on the wire of the route and of the route back; None changes nothing.
        need: what the connection needs of a route that it shares; None for all of it. See `send_buffers`.

    Returns:
        The bytes asked for on a connection that shares its route, where the kernel would exceed them unless data is
        sent in blocks (see `Blocks`); else None.
    """
    round_trip = None if rates is None else _least_round_trip(connection)
    if rates is not None and round_trip is not None:
        needed, paced = (math.inf, False) if need is None else (need.rate, need.pace is not None)
        window = int(send_buffers(*rates, round_trip, needed, paced))
        # The kernel silently reduces a larger window to its limit, which would underuse the route. It then does better
        # with its own automatic size.
        if window <= _largest_buffer():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
            if need is not None and window < _LARGEST_SEGMENT and sys.platform == "linux":
                return window
    return None


class Blocks:
    """Sends data of a connection in blocks, so that the kernel holds no more than its send buffer.

    Linux appends data to the last segment of a connection, up to 64 KiB, without asking whether the send buffer has
    room. It sends that much at once to a close peer, whatever the pace. So ten small messages over sixteen connections
    between two racks overflowed the queue of their link: steps took 0.69 s in place of 0.49 s. After the end of a
    record (``MSG_EOR``), the kernel begins another segment, and asks.

    Attributes:
        size: bytes of a block, about; None sends as much as the kernel takes.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._open = 0

    def send(self, connection: socket.socket, buffers: Sequence[memoryview]) -> int:
        """Send the first bytes of ``buffers``; returns their number.

        Raises:
            OSError: nothing can be sent now, or the connection is lost.
        """
        if self.size is None:
            return connection.sendmsg(buffers)
        block, length = [], 0
        for buffer in buffers:
            block.append(buffer[: self.size - length])
            length += len(block[-1])
        # Small frames share a block.
        ends = self._open + length >= self.size / 2
        sent = connection.sendmsg(block, [], socket.MSG_EOR if ends else 0)
        # The kernel ends the record only if it takes all of the block.
        self._open = 0 if ends and sent == length else self._open + sent
        return sent


def _largest_buffer() -> float:
    """The largest send buffer, in bytes, that the kernel grants on request."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):
        return math.inf


def _least_round_trip(connection: socket.socket) -> float | None:
    """The least round-trip time that the kernel has seen, in seconds; None where the system does not report it.

    The kernel's smoothed time is no measure of the route, because one late acknowledgement during the handshake adds 5
    ms. It did so on some ranks of each job; these filled the queues of all links, and steps took up to 1.3 times as
    long.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_OFFSET + 4)
    if len(info) < _ROUND_TRIP_OFFSET + 4:
        return None
    (found,) = struct.unpack_from("=I", info, _ROUND_TRIP_OFFSET)
    return None if found == _UNKNOWN_ROUND_TRIP else float(found) * 1e-6
