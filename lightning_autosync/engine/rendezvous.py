"""How ranks find each other: small agreements over the process group, and sockets between pairs of ranks."""

from __future__ import annotations

import errno
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.engine import greeting
from lightning_autosync.engine.door import Door, Visitor
from lightning_autosync.errors import ExchangeError

_GREETING_TIMEOUT = 10.0
"""Seconds that whoever connects may take to say who it is; others are heard meanwhile."""
_LOOK = 0.1
"""Seconds between looks at the calls of the own."""


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must lie for the group's collectives."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order; values are plain JSON data and may differ in size."""
    device = group_device(group)
    payload = json.dumps(value).encode()
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(other) for other in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(bytes(other[: int(length)].tolist())) for other, length in zip(gathered, sizes, strict=True)]


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

    The higher rank of a pair listens on its own address, the lower one dials. Both prove that they know a secret that
    rank 0 drew and handed out over the group, so that strangers are turned away; see `greeting`.

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
        secret = str(offers[0][2]).encode()
        expected = {low for low, high in edges if high == rank}
        meeting = _Meeting(listener, secret, rank, expected, deadline)
        cleanup.callback(meeting.close)
        sockets = meeting.run({high: offers[high][0] for low, high in edges if low == rank})
    for connection in sockets.values():
        connection.setblocking(True)
    return sockets


class _Meeting:
    """One rank's calls to its peers, and theirs to it, all at the same time.

    Args:
        listener: where peers call.
        expected: who will.
        deadline: for all (seconds of `time.monotonic`).
    """

    def __init__(self, listener: socket.socket, secret: bytes, rank: int, expected: set[int], deadline: float) -> None:
        self._secret, self._rank, self._expected, self._deadline = secret, rank, expected, deadline
        self._selector = selectors.DefaultSelector()
        self._door = Door(listener, self._selector, secret, _GREETING_TIMEOUT, self._admit)
        self._sockets: dict[int, socket.socket] = {}
        self._over = False

    def run(self, targets: dict[int, list[Any]]) -> dict[int, socket.socket]:
        """Call those at ``targets`` and be called; the connections, which are the caller's then.

        Raises:
            ExchangeError: one is missing in the end.
        """
        with ThreadPoolExecutor(max(1, len(targets))) as callers:
            calls = {peer: callers.submit(self._dial, target, peer) for peer, target in targets.items()}
            try:
                self._be_called(calls)
                for peer, made in calls.items():
                    self._sockets[peer] = made.result()
            except BaseException:
                self._over = True
                for made in calls.values():
                    made.add_done_callback(_hang_up)
                raise
        sockets, self._sockets = self._sockets, {}
        return sockets

    def close(self) -> None:
        """Take no more calls; connections that were not handed out are closed."""
        self._door.close()
        self._selector.close()
        for connection in self._sockets.values():
            connection.close()

    def _be_called(self, calls: dict[int, Future[socket.socket]]) -> None:
        while missing := self._expected - self._sockets.keys():
            now = time.monotonic()
            for made in calls.values():
                if made.done():
                    made.result()
            if now > self._deadline:
                raise ExchangeError(f"no connection from rank {', '.join(map(str, sorted(missing)))} in time")
            for key, _ in self._selector.select(min(_LOOK, self._deadline - now)):
                key.data()
            self._door.tick(now)

    def _admit(self, visitor: Visitor) -> None:
        try:
            peer = json.loads(visitor.claim)
            if type(peer) is not int or peer not in self._expected:
                raise ValueError("not one of those that call")
            visitor.answer(b"")
        except (OSError, ValueError, RecursionError):
            visitor.connection.close()
            return
        if peer in self._sockets:  # it calls again, as it did not hear the answer
            self._sockets[peer].close()
        self._sockets[peer] = visitor.connection

    def _dial(self, target: list[Any], peer: int) -> socket.socket:
        claim = json.dumps(self._rank).encode()
        try:
            found = greeting.call_until(target, self._secret, claim, self._deadline, lambda: self._over)
        except OSError as cause:
            place = ":".join(map(str, target)).lstrip("\0")
            raise ExchangeError(f"rank {peer} cannot be reached at {place}: {cause}") from None
        if found is None:
            raise ExchangeError(f"rank {peer} was called in vain")
        return found[0]


def _hang_up(made: Future[socket.socket]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _endpoint(listener: socket.socket) -> list[Any]:
    """What peers dial: host and port, or the name of a socket of this machine."""
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
