"""Dense messages in shared memory of one machine: each rank sums its part of all ranks' buffers.

The memory has no name. Rank 0 makes an anonymous file (``memfd_create(2)``), sends its descriptor to the other ranks
over Unix sockets, and all ranks map it. The memory is therefore freed when the last process ends, even by a crash, and
the size of ``/dev/shm``, which is small in containers, does not limit it.

Ranks signal each other with a few bytes over the same sockets, for three reasons: system calls order the memory
accesses before and after them on every processor, a waiting rank leaves its core to ranks that still compute, and the
death of a rank is noticed at once.
"""

from __future__ import annotations

import atexit
import mmap
import os
import resource
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.collectives import gather_json, require_success
from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.waiting import explained, wait_for_ranks
from lightning_autosync.errors import ExchangeError, OpeningError, PeerLost, PlanError
from lightning_autosync.plan.schedule import Message, SharedMemoryReduce

CHUNK = 256 * 1024
"""Bytes per buffer that are summed at a time, so that they stay in a core's cache."""
_RECORD = struct.Struct("=II")
_LEAVE = 2**32 - 1
"""Signal number of a rank that takes part in no further step."""
_READ = 4096
"""Largest number of bytes per read."""


class SharedMemoryExchange(Exchange):
    """Sums the buffers of all ranks into one shared result, without sending data over sockets.

    When all ranks have filled their buffers, each rank sums its own part of all buffers, in rank order, and writes the
    sum into the result. When all parts are written, each rank reads the result. It is written again only after all
    ranks have filled their buffers for the next step, and have therefore read it.

    Args:
        message: a message with one round.
        memory: shared memory with a buffer [numel + tail] of the message for each rank and one for the sum.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds to wait for other ranks.
    """

    def __init__(
        self,
        message: Message,
        memory: SharedMemory,
        rank: int,
        world_size: int,
        timeout: float,
    ) -> None:
        dtype = getattr(torch, message.dtype)
        *buffers, result = (memory.buffer(message.index, place, dtype) for place in range(world_size + 1))
        self.result = result
        self._filled, self._summed = 2 * message.index, 2 * message.index + 1
        self._signals = memory.signals
        self._name, self._what = message.name, f"message '{message.name}'"
        self._timeout = timeout
        self._step = 0
        length = max(1, CHUNK // buffers[0].itemsize)
        self._chunks = [
            [part[start : min(start + length, stop)] for part in (result, *buffers)]
            for lower, stop in _parts(message, rank)
            for start in range(lower, stop, length)
        ]

    def start(self) -> None:
        self._step += 1
        self._signals.send(self._filled, self._step)

    def resume(self) -> None:
        with profiled(self._name, "wait"):
            self._signals.wait(self._filled, self._step, self._what, self._timeout)
        with profiled(self._name, "reduce"):
            self._reduce()
        self._signals.send(self._summed, self._step)

    def _reduce(self) -> None:
        for total, first, *others in self._chunks:
            if not others:
                total.copy_(first)
                continue
            # Not a copy followed by additions: that would pass through the result once more.
            torch.add(first, others[0], out=total)
            for other in others[1:]:
                total.add_(other)

    def wait(self) -> None:
        self._signals.wait(self._summed, self._step, self._what, self._timeout)


def _parts(message: Message, rank: int) -> list[tuple[int, int]]:
    """The ranges of elements (start, stop) that a rank sums."""
    (single,) = message.rounds
    shared = [transfer for transfer in single.transfers if isinstance(transfer, SharedMemoryReduce)]
    return [(transfer.bounds[rank], transfer.bounds[rank + 1]) for transfer in shared]


class SharedMemory:
    """Shared memory, mapped by all ranks: one region for each rank and one for the sums. Made collectively.

    Args:
        sizes: bytes of each buffer in a region, by message index; the same on every rank.
        group: the ranks; None is the default group.
        timeout: seconds in which the ranks must connect.

    Attributes:
        signals: signals by which ranks tell each other that data is ready.

    Raises:
        PlanError: the ranks cannot share memory (raised on every rank).
        ExchangeError: there is not enough memory, or ranks cannot connect (raised on every rank).
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
        with ExitStack() as undo:
            sockets, fault = dict[int, socket.socket](), ""
            try:
                sockets = connect_pairs(combinations(range(ranks), 2), group, name, timeout)
            except (OpeningError, PeerLost):  # on every rank
                raise
            except (ExchangeError, OSError) as cause:
                fault = str(cause)
            for connection in sockets.values():
                undo.enter_context(connection)
            require_success(fault, group)
            mapping = _map(size, sockets, group, timeout)
            undo.pop_all()
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.signals = StepSignals(sockets)

    def buffer(self, number: int, rank: int, dtype: torch.dtype) -> Tensor:
        """The buffer ``number`` of ``rank``, initially zeros; the number of ranks in place of a rank gives the sum."""
        start = rank * self._region + self._offsets[number]
        return self._memory[start : start + self._sizes[number]].view(dtype)

    def close(self) -> None:
        """Tell the other ranks that this rank leaves. The memory stays mapped while a tensor uses it."""
        self.signals.close()


def sharing_fault(size: int, group: dist.ProcessGroup | None = None) -> str:
    """The reason why the ranks cannot share ``size`` bytes, the same on all ranks; empty if they can. Collective."""
    votes = gather_json([_own_fault(size), _machine()], group)
    for rank, (fault, machine) in enumerate(votes):
        if fault:
            return f"rank {rank}: {fault}"
        if machine != votes[0][1]:
            return f"rank {rank} is on another machine or in another network namespace than rank 0"
    return ""


def _own_fault(size: int) -> str:
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"anonymous shared memory (memfd_create) needs Linux, not {sys.platform}"
    try:
        with os.fdopen(os.memfd_create("autosync"), "wb") as trial:
            os.posix_fallocate(trial.fileno(), 0, 1)
    except OSError as cause:
        return f"cannot create anonymous shared memory (memfd_create): {cause}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < size:
        return f"{size} bytes are needed, but the limit of file sizes is {limit} (ulimit -f)"
    return ""


def _machine() -> list[str]:
    """Kernel and network namespace of this process. Processes with equal ones can pass descriptors to each other."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    except OSError:
        return [socket.gethostname()]


def _map(size: int, sockets: Mapping[int, socket.socket], group: dist.ProcessGroup | None, timeout: float) -> mmap.mmap:
    """Map a new file of ``size`` bytes, which rank 0 makes, on every rank; collective."""
    with ExitStack() as cleanup:
        descriptor, fault = -1, ""
        if dist.get_rank(group) == 0:
            try:
                descriptor = os.memfd_create("autosync")
                cleanup.callback(os.close, descriptor)
                # Allocate all pages now: running out of memory later would end the process with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            except OSError as cause:
                fault = f"cannot allocate {size} bytes of shared memory: {cause}"
        require_success(fault, group)
        mapping = None
        try:
            if descriptor >= 0:
                for connection in sockets.values():
                    socket.send_fds(connection, [b"\0"], [descriptor])
            else:
                sockets[0].settimeout(timeout)
                _, (descriptor,), _, _ = socket.recv_fds(sockets[0], 1, 1)
                cleanup.callback(os.close, descriptor)
            # MAP_POPULATE makes the page faults now and not in the first step.
            mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as cause:
            fault = f"cannot map {size} bytes of shared memory: {cause}"
        require_success(fault, group)
    assert mapping is not None
    return mapping


class _Peer:
    """One connection, and the last step for which each signal arrived."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.steps: dict[int, int] = {}
        self.unread = bytearray()
        self.unsent = bytearray()
        self.gone = ""

    def read(self) -> None:
        """Read available signals; `gone` gives the reason if no more will come."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as cause:
            self.gone = self.gone or str(cause)
            return
        if not data:
            self.gone = self.gone or "it was closed"
        self.unread += data
        whole = len(self.unread) // _RECORD.size * _RECORD.size
        for signal, step in _RECORD.iter_unpack(self.unread[:whole]):
            if signal == _LEAVE:
                self.gone = "left"
            else:
                self.steps[signal] = step
        del self.unread[:whole]

    def send(self) -> None:
        """Send as much of the queued data as the kernel accepts."""
        try:
            del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The next read reports the reason, after the signals that the peer sent before it ended.
            self.unsent.clear()


class StepSignals:
    """Numbered signals that each rank sends in each step, and for which the other ranks wait. Not thread-safe.

    Args:
        sockets: connected stream sockets to every other rank, by rank; this object owns them from now on.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._error: ExchangeError | None = None
        self._process = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._peers = [_Peer(rank, connection) for rank, connection in sorted(sockets.items())]
        for peer in self._peers:
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        # A script may end without closing the engine. Peers must then see that this rank left, not that it died.
        atexit.register(self.close)

    def send(self, signal: int, step: int) -> None:
        """Send ``signal`` of ``step`` to all peers, which may then read the data that this rank wrote before."""
        record = _RECORD.pack(signal, step)
        for peer in self._peers:
            peer.unsent += record
            peer.send()

    def wait(self, signal: int, step: int, what: str, timeout: float) -> None:
        """Wait for ``signal`` of ``step`` from every peer; ``what`` names it in errors.

        Raises:
            ExchangeError: a peer was lost, has left, or did not answer in ``timeout`` seconds.
        """
        if self._error is not None:
            raise self._error
        try:
            wait_for_ranks(lambda seconds: self._has_come(signal, step, seconds), what, timeout)
        except ExchangeError as error:
            self._fail(error)

    def close(self) -> None:
        """Tell the peers that this rank leaves, and close the connections."""
        atexit.unregister(self.close)
        # A forked child shares the sockets with its parent, and must not send in its name.
        tells = self._error is None and os.getpid() == self._process
        for peer in self._peers:
            if tells:
                peer.unsent += _RECORD.pack(_LEAVE, 0)
                peer.send()
            peer.socket.close()
        self._peers = []
        self._selector.close()

    def _has_come(self, signal: int, step: int, seconds: float) -> bool:
        """Whether every peer has sent ``signal`` of ``step``; waits for at most ``seconds``."""
        deadline: float | None = None
        while missing := [peer for peer in self._peers if peer.steps.get(signal, 0) < step or peer.unsent]:
            now = time.monotonic()
            deadline = now + seconds if deadline is None else deadline
            self._check(missing, signal, step)
            if now >= deadline:
                return False
            self._serve(deadline - now)
        return True

    def _serve(self, timeout: float) -> None:
        for peer in self._peers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            if not peer.gone and self._selector.get_key(peer.socket).events != events:
                self._selector.modify(peer.socket, events, peer)
        for key, events in self._selector.select(timeout):
            peer = key.data
            if events & selectors.EVENT_WRITE:
                peer.send()
            if events & selectors.EVENT_READ:
                peer.read()
            if peer.gone:
                self._selector.unregister(peer.socket)

    def _check(self, missing: list[_Peer], signal: int, step: int) -> None:
        for peer in missing:
            if peer.gone == "left":
                raise explained(
                    f"rank {peer.rank} has ended after step {peer.steps.get(signal, 0)}; this is step {step}"
                )
            if peer.gone:
                raise explained(f"lost the connection to rank {peer.rank}: {peer.gone}")

    def _fail(self, error: ExchangeError) -> NoReturn:
        """Close all connections, by which other ranks notice, and raise ``error``."""
        self._error = error
        for peer in self._peers:
            peer.socket.close()
        raise error
