"""Whether a rank has the memory for the buffers of a further plan. Linux ends a process that takes too much of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from lightning_autosync.documents import bytes_text
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import AllToAll, Schedule, TreeTransfer

SHARE = 0.5
"""Share of the available memory that a further plan may take. The job's own need changes from moment to moment."""
_MEMORY, _OWN_GROUPS, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller of a control group (version 2 has one for all): files with the limit and with the use, and the name
of what the system can take back from it."""


def buffer_fault(schedule: Schedule, rank: int, sharing: int) -> str:
    """The reason why this rank has no memory for the buffers of a plan; empty if it has, or if that is unknown.

    Args:
        schedule: the compiled plan.
        rank: this rank.
        sharing: number of ranks on this host, which open the plan at the same time.
    """
    needed, available = sharing * buffer_bytes(schedule, rank), available_memory()
    if available is None or needed <= SHARE * available:
        return ""
    return (
        f"its host has {bytes_text(available)} of memory left, and buffers of the plan would take "
        f"{bytes_text(needed)}; allowed: {SHARE:.0%}"
    )


def buffer_bytes(schedule: Schedule, rank: int) -> int:
    """Bytes that the dense messages of a schedule take on a rank, with what other ranks contribute to sums there.

    A message that is compressed with error feedback also keeps what is lost of each gradient.
    """
    total = 0
    for message in schedule.messages:
        itemsize = getattr(torch, message.dtype).itemsize
        if message.compressor.kind != "none" and message.compressor.error_feedback:
            total += message.numel * itemsize
        for each in message.rounds if not message.rows else ():
            total += each.length * itemsize
            for transfer in each.transfers:
                if isinstance(transfer, TreeTransfer):
                    received, partner = transfer.reduce.children[rank], transfer.partner(rank)
                    # Each of two roots receives the other's sum, and sends a copy of its own.
                    ranges = len(received) - (partner in received) + 2 * (partner >= 0)
                    total += ranges * (transfer.stop - transfer.start) * itemsize
                elif isinstance(transfer, PairwiseReduce):
                    # A rank receives what it adds in memory of its own, and sends a copy of a whole sum.
                    for turn in transfer.turns(rank, (transfer.start, transfer.stop)):
                        start, stop = turn.receives or (0, 0)
                        total += turn.adds * (1 + (turn.sends == turn.receives)) * (stop - start) * itemsize
                elif isinstance(transfer, AllToAll):
                    total += 2 * each.length * itemsize
    return total


def available_memory() -> int | None:
    """Bytes that processes of this host may still take, within the limits of control groups; None if unknown."""
    return min([*_left_on_host(), *_left_in_groups()], default=None)


def _left_on_host() -> Iterator[int]:
    with suppress(OSError):
        if found := re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMORY.read_text(), re.MULTILINE):
            yield 1024 * int(found[1])


def _left_in_groups() -> Iterator[int]:
    """Bytes below the limit of each control group that has one, of this process and of the groups around it."""
    lines = list[str]()
    with suppress(OSError):
        lines = _OWN_GROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _FILES.keys() & {*controllers.split(",")}:
            root = _GROUPS / controller
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(root):
                    yield from _left_in(folder, *_FILES[controller])


def _left_in(folder: Path, limit: str, used: str, reclaimable: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # no such group or file here; the limit is "max"
        left, spare = int((folder / limit).read_text()) - int((folder / used).read_text()), 0
        with suppress(OSError):
            if found := re.search(rf"^{reclaimable} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE):
                spare = int(found[1])
        yield max(0, left + spare)
