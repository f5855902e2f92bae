"""The conditions inside a worker: its machine, its kernel's settings, and what its connections sent."""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

import torch

from lightning_autosync.measure.workers.cores import usable_cores

POLICIES = {
    getattr(os, name): name
    for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
    if hasattr(os, name)
}
_BYTES_SENT = 200
"""Offset of tcpi_bytes_sent, 8 bytes, in ``struct tcp_info`` of Linux 4.19 and later."""


def bytes_sent() -> int | None:
    """Payload bytes that this process sent so far over the TCP connections that it has open.

    The kernel counts them socket by socket, so nothing of other processes is in it, and no framing. None where
    it does not.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError), _shared_socket(int(entry)) as connection:  # not a socket, or not TCP
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
            total += struct.unpack_from("Q", information, _BYTES_SENT)[0]
    return total


def _shared_socket(descriptor: int) -> socket.socket:
    """The socket of a descriptor that somebody else owns and that stays open when this one is closed."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


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
