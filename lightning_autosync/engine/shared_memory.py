"""Memory that the ranks of one machine share.

It has no name anywhere: one rank makes an anonymous file (``memfd_create(2)``), hands its descriptor to the others over
Unix sockets, and all map it. So it ends with the last process that maps it, however that ends, and the size of
``/dev/shm``, which containers keep small, does not limit it.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.engine.handover import Handover
from lightning_autosync.errors import ExchangeError, PlanError


class SharedMemory:
    """A region of memory for every rank and one for the sums, all of them mapped by all ranks; made collectively.

    Args:
        sizes: bytes of each buffer in a region, by number; the same on every rank.
        group: the ranks; None is the default group.
        timeout: seconds, at most, for the ranks to connect.

    Attributes:
        handover: tells the ranks how far the others are.

    Raises:
        PlanError: on every rank if they cannot share memory.
        ExchangeError: on every rank if there is not enough memory, or ranks cannot connect.
    """

    def __init__(self, sizes: Mapping[int, int], group: dist.ProcessGroup | None, timeout: float) -> None:
        self._sizes = dict(sizes)
        self._offsets: dict[int, int] = {}
        self._region = 0
        for number, size in sizes.items():
            self._offsets[number] = self._region
            self._region += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        ranks = dist.get_world_size(group)
        size = (ranks + 1) * self._region
        if fault := sharing_fault(size, group):
            raise PlanError(f"schedule: topology 'shared_memory': {fault}")
        name = f"\0autosync-{secrets.token_hex(16)}"
        sockets = connect_pairs(combinations(range(ranks), 2), group, name, timeout)
        with ExitStack() as undo:
            for connection in sockets.values():
                undo.enter_context(connection)
            mapping = _map(size, sockets, group, timeout)
            undo.pop_all()
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.handover = Handover(sockets)

    def buffer(self, number: int, rank: int, dtype: torch.dtype) -> Tensor:
        """A rank's buffer, or that of the sums for the number of ranks; zeros until it is written to."""
        start = rank * self._region + self._offsets[number]
        return self._memory[start : start + self._sizes[number]].view(dtype)

    def close(self) -> None:
        """Take leave of the other ranks; the memory stays for as long as a tensor lies in it."""
        self.handover.close()


def sharing_fault(size: int, group: dist.ProcessGroup | None = None) -> str:
    """Why the ranks cannot share ``size`` bytes of memory, the same answer on all; empty if they can. Collective."""
    votes = gather_json([_own_fault(size), _machine()], group)
    for rank, (fault, machine) in enumerate(votes):
        if fault:
            return f"rank {rank}: {fault}"
        if machine != votes[0][1]:
            return f"rank {rank} is on another machine than rank 0, or in another network namespace"
    return ""


def _own_fault(size: int) -> str:
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"memory without a name (memfd_create) needs Linux, not {sys.platform}"
    try:
        with os.fdopen(os.memfd_create("autosync"), "wb") as trial:
            os.posix_fallocate(trial.fileno(), 0, 1)
    except OSError as cause:
        return f"no memory without a name (memfd_create): {cause}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < size:
        return f"{size} bytes are needed, the limit of a file is {limit} (ulimit -f)"
    return ""


def _machine() -> list[str]:
    """What processes have in common that can hand descriptors to each other: kernel and network namespace."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    except OSError:
        return [socket.gethostname()]


def _map(size: int, sockets: Mapping[int, socket.socket], group: dist.ProcessGroup | None, timeout: float) -> mmap.mmap:
    """Map one new file of ``size`` bytes, made by rank 0, on every rank."""
    with ExitStack() as cleanup:
        descriptor, fault = -1, ""
        if dist.get_rank(group) == 0:
            try:
                descriptor = os.memfd_create("autosync")
                cleanup.callback(os.close, descriptor)
                # All of it now: memory that is missing later would be a SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            except OSError as cause:
                fault = f"no {size} bytes of shared memory: {cause}"
        _raise_any(fault, group)
        for connection in sockets.values() if dist.get_rank(group) == 0 else ():
            socket.send_fds(connection, [b"\0"], [descriptor])
        mapping = None
        try:
            if descriptor < 0:
                sockets[0].settimeout(timeout)
                _, (descriptor,), _, _ = socket.recv_fds(sockets[0], 1, 1)
                cleanup.callback(os.close, descriptor)
            mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as cause:
            fault = f"{size} bytes of shared memory cannot be mapped: {cause}"
        _raise_any(fault, group)
    assert mapping is not None
    return mapping


def _raise_any(fault: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if one has a fault."""
    for rank, other in enumerate(gather_json(fault, group)):
        if other:
            raise ExchangeError(f"rank {rank}: {other}")
