"""Conditions of a measurement: machines, settings of the kernel, bytes sent, and how much other processes disturb."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch

POLICIES = {
    getattr(os, name): name
    for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
    if hasattr(os, name)
}
BUSY = 0.1
"""Cores used by other processes from which on a bench backs no claim."""


def usable_cores() -> int:
    """Cores that this process and its children may run on: a container or a job may have less than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> tuple[str, str]:
    """What tells this machine from others, until it is booted anew, and its name."""
    identity = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname()
    return identity.read_text().strip() if identity.exists() else name, name


def load_average() -> tuple[float, float, float]:
    """Processes that ran or waited on this machine: means over 1, 5 and 15 minutes."""
    return os.getloadavg()


def describe_worker() -> dict[str, str | int | None]:
    """What may change speed: the machine, versions, threads, TCP algorithm, scheduling policy."""
    facts: dict[str, str | int | None] = {
        "machine": socket.gethostname(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    algorithm = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    if algorithm.exists():
        facts["tcp_congestion_control"] = algorithm.read_text().strip()
    if hasattr(os, "sched_getscheduler"):
        policy = os.sched_getscheduler(0)
        facts["scheduling_policy"] = POLICIES.get(policy, str(policy))
    return facts


class LoadMeter:
    """Counts, from its creation on, the processor time that other processes use on this machine.

    Args:
        pids: the workers, which run on this machine and count as little as this process does.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = self._read()

    def foreign_cores(self) -> float | None:
        """Cores that others kept busy on average since the start; None where the kernel does not tell.

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
