"""How ranks find each other: small agreements over the process group, and sockets between pairs of ranks."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.errors import ExchangeError

_HELLO = struct.Struct("<16sI")
_HELLO_TIMEOUT = 2.0
"""Seconds that whoever connects may take to say who it is."""


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
    """Open one connection for every pair of ranks, collectively; returns this rank's, by peer.

    The higher rank of a pair listens on its own address; the lower one dials and names a secret that rank 0 drew, so
    that strangers are turned away. The network itself is trusted, as it is by the backends' own connections.

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
            listener = cleanup.enter_context(listen(address or own_address(), len(edges)))
        except (OSError, ExchangeError) as cause:
            fault = str(cause)
        own = _endpoint(listener) if listener is not None else None
        offers = gather_json([own, fault, secrets.token_hex(16) if rank == 0 else ""], group)
        for other, (_, problem, _) in enumerate(offers):
            if problem:
                raise ExchangeError(f"rank {other} cannot listen for its peers: {problem}")
        assert listener is not None
        secret = bytes.fromhex(offers[0][2])
        sockets: dict[int, socket.socket] = {}
        undo = cleanup.enter_context(ExitStack())
        for low, high in edges:
            if low == rank:
                sockets[high] = undo.enter_context(_dial(offers[high][0], high, _HELLO.pack(secret, rank), deadline))
        expected = {low for low, high in edges if high == rank}
        while expected:
            peer, connection = _accept(listener, secret, expected, deadline)
            sockets[peer] = undo.enter_context(connection)
            expected.remove(peer)
        undo.pop_all()
    return sockets


def _endpoint(listener: socket.socket) -> list[Any]:
    """What peers dial: host and port, or the name of a socket of this machine."""
    name = listener.getsockname()
    return [name.decode()] if isinstance(name, bytes) else list(name[:2])


def listen(address: str, backlog: int) -> socket.socket:
    """A socket that listens on a free port of ``address``.

    Raises:
        ExchangeError: the address is not this machine's.
    """
    if address.startswith("\0"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(max(1, backlog))
        return listener
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=max(1, backlog))
    except OSError as cause:
        raise ExchangeError(f"{address}: {cause}; a node's address in the cluster is the node's own") from None


def _dial(target: list[Any], peer: int, hello: bytes, deadline: float) -> socket.socket:
    try:
        connection = _open(target, max(0.1, deadline - time.monotonic()))
        connection.sendall(hello)
    except OSError as cause:
        place = ":".join(map(str, target)).lstrip("\0")
        raise ExchangeError(f"rank {peer} cannot be reached at {place}: {cause}") from None
    return connection


def _open(target: list[Any], timeout: float) -> socket.socket:
    if len(target) == 2:
        return socket.create_connection(tuple(target), timeout=timeout)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    connection.connect(target[0])
    return connection


def _accept(listener: socket.socket, secret: bytes, expected: set[int], deadline: float) -> tuple[int, socket.socket]:
    while (remaining := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        offered, peer = _read_hello(connection)
        if secrets.compare_digest(offered, secret) and peer in expected:
            return peer, connection
        connection.close()
    missing = ", ".join(map(str, sorted(expected)))
    raise ExchangeError(f"no connection from rank {missing} in time")


def _read_hello(connection: socket.socket) -> tuple[bytes, int]:
    """Secret and rank of whoever connected; an empty secret if it does not say."""
    connection.settimeout(_HELLO_TIMEOUT)
    hello = b""
    try:
        while len(hello) < _HELLO.size:
            part = connection.recv(_HELLO.size - len(hello))
            if not part:
                return b"", -1
            hello += part
    except OSError:
        return b"", -1
    secret, peer = _HELLO.unpack(hello)
    return secret, peer
