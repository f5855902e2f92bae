"""How much of the machine others used while a turn was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


class LoadMeter:
    """Counts the processor time on this machine that neither this process nor the workers, all of them here, spent.

    Args:
        pids: the workers.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = self._read()

    def restart(self) -> None:
        """Count from now on."""
        self._start = self._read()

    def foreign_cores(self) -> float | None:
        """Cores that others kept busy since the last start; None where the kernel does not tell.

        The kernel counts in ticks of 10 ms, so a short turn tells little by itself.
        """
        now = self._read()
        if self._start is None or now is None:
            return None
        elapsed, foreign = (end - start for start, end in zip(self._start, now, strict=True))
        return max(0.0, foreign / elapsed)

    def _read(self) -> tuple[float, float] | None:
        """The time, and processor seconds of everybody else since the machine started."""
        try:
            machine = machine_ticks(Path("/proc/stat").read_text())
            workers = sum(process_ticks(Path(f"/proc/{pid}/stat").read_text()) for pid in self._pids)
        except OSError:
            return None
        ticks = (machine - workers) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), ticks - time.process_time()


def machine_ticks(table: str) -> int:
    """User, nice and system time of all cores, from a text in the form of ``/proc/stat``."""
    user, nice, system = table.split("\n", 1)[0].split()[1:4]
    return int(user) + int(nice) + int(system)


def process_ticks(line: str) -> int:
    """User and system time of a process, from a text in the form of ``/proc/PID/stat``."""
    user, system = line.rpartition(")")[2].split()[11:13]  # the name, in parentheses, may contain blanks
    return int(user) + int(system)
