"""Conditions of a measurement: the machine, kernel settings, and the load of other processes and machines."""

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
BUSY_CORES = 0.1
"""Number of cores used by other processes or virtual machines above which a bench backs no claim."""

_TCP = Path("/proc/sys/net/ipv4")


def usable_cores() -> int:
    """Cores on which this process and its children may run: in a container or a job, perhaps not all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def windows_restart() -> bool:
    """Whether the kernel makes the congestion window of a connection smaller while it is idle; True if it is unknown.

    BBR does not. In a network namespace, such as a container, the namespace's setting counts.
    """
    try:
        restarts = (_TCP / "tcp_slow_start_after_idle").read_text().strip() != "0"
        return restarts and not (_TCP / "tcp_congestion_control").read_text().startswith("bbr")
    except OSError:
        return True


def boot_id() -> str | None:
    """An id of this machine, which all its containers share until it reboots; None if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def machine() -> tuple[str, str]:
    """An id of this machine, and its name. Without a `boot_id` the name is also the id, so names have to differ."""
    name = socket.gethostname()
    return boot_id() or name, name


def load_average() -> tuple[float, float, float]:
    """Mean numbers of running or waiting processes on this machine over 1, 5 and 15 minutes."""
    return os.getloadavg()


def describe_worker() -> dict[str, str | int | None]:
    """Facts that may affect speed: the machine, versions, threads, TCP algorithm, scheduling policy."""
    facts: dict[str, str | int | None] = {
        "machine": socket.gethostname(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_initialized():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    algorithm = _TCP / "tcp_congestion_control"
    if algorithm.exists():
        facts["tcp_congestion_control"] = algorithm.read_text().strip()
    if hasattr(os, "sched_getscheduler"):
        policy = os.sched_getscheduler(0)
        facts["scheduling_policy"] = POLICIES.get(policy, str(policy))
    return facts


class LoadMeter:
    """Counts the processor time that other processes and other virtual machines take from this one's workers.

    Args:
        pids: process ids of the workers on this machine, and of what carries their traffic. Neither they nor this
            process count as other processes. None if workers run elsewhere: then nothing is counted.
    """

    def __init__(self, pids: Sequence[int] | None) -> None:
        # In a job, the list of workers has this process too, whose time is counted by itself.
        self._pids = None if pids is None else [pid for pid in pids if pid != os.getpid()]
        self._start = self._read()

    def foreign_cores(self) -> float | None:
        """Mean number of cores that others kept busy since the meter's creation; None if nothing counts them.

        The kernel counts in ticks of 10 ms, so the value of a short turn is imprecise.
        """
        now = self._read()
        if self._start is None or now is None:
            return None
        elapsed, foreign = (end - start for start, end in zip(self._start, now, strict=True))
        return max(0.0, foreign / elapsed)

    def _read(self) -> tuple[float, float] | None:
        """The time, and processor seconds of all other processes since the machine started."""
        if self._pids is None:
            return None
        try:
            machine = machine_ticks(Path("/proc/stat").read_text())
            workers = sum(process_ticks(Path(f"/proc/{pid}/stat").read_text()) for pid in self._pids)
        except (OSError, ValueError):  # not Linux, or without times of other virtual machines
            return None
        ticks = (machine - workers) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), ticks - time.process_time()


def machine_ticks(table: str) -> int:
    """User, nice, system and steal ticks of all cores, from the text of ``/proc/stat``.

    Steal is time in which a virtual machine had to wait for a core, because its host gave it to another one.
    """
    user, nice, system, _, _, _, _, steal = map(int, table.split("\n", 1)[0].split()[1:9])
    return user + nice + system + steal


def process_ticks(line: str) -> int:
    """User and system ticks of a process, from the text of ``/proc/PID/stat``."""
    user, system = line.rpartition(")")[2].split()[11:13]  # the name, in parentheses, may contain blanks
    return int(user) + int(system)
