"""The program that delays the frames of emulated links where the kernel has no ``netem``.

:class:`~lightning_autosync.measure.emulation.delays.Relay` runs it by its path. It imports nothing of the package, so
that it starts fast. Each link is two TAP devices, and it moves the frames of each to the other. It ends with its input.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

LARGEST_FRAME = 66_000  # bytes; a segmentation-offloaded packet of 64 KiB with its headers
BATCH = 64  # frames read from a device before other devices have their turn


def carry(ways: Mapping[int, tuple[int, float]], lifeline: int) -> None:
    """Move frames until the lifeline ends or a device is removed.

    Args:
        ways: by descriptor of a device, the device that gets its frames and their delay in seconds. None blocks.
        lifeline: descriptor whose end ends this.
    """
    under_way: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        # The time-outs of `poll` and `epoll` are whole milliseconds.
        readable, _, _ = select.select([lifeline, *ways], [], [], wait)
        if lifeline in readable:
            return
        for source in readable:
            target, delay = ways[source]
            for frame in waiting_frames(source):
                heapq.heappush(under_way, (time.monotonic() + delay, next(numbers), target, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(under_way)
            with suppress(OSError):  # during set-up, the other end may still be down
                os.write(target, frame)


def waiting_frames(device: int) -> Iterator[bytes]:
    """The frames that wait at a device, `BATCH` at most."""
    with suppress(BlockingIOError):
        for _ in range(BATCH):
            yield os.read(device, LARGEST_FRAME)


def hurry() -> None:
    """Run ahead of other processes, so that their load does not lengthen delays."""
    gc.disable()
    with suppress(OSError):  # some containers forbid real-time scheduling
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main(arguments: Sequence[str]) -> None:
    """Carry frames; each argument is a link: the descriptors of its two devices and its delay, as in ``5:6:0.02``."""
    ways: dict[int, tuple[int, float]] = {}
    for argument in arguments:
        one, other, delay = argument.split(":")
        ways[int(one)] = (int(other), float(delay))
        ways[int(other)] = (int(one), float(delay))
    hurry()
    carry(ways, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
