"""The processor cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process and its children may run on: a container or a job may have less than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
