"""The kernel's scheduling policy for ranks that share cores."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def set_batch_scheduling() -> bool:
    """Put every thread of this process, and the threads that they start later, under ``SCHED_BATCH``.

    A rank that wakes up for a small message then does not preempt a rank that computes on the same core, and small
    collectives take a fraction of the time. The policy needs no privilege.

    Returns:
        Whether the policy is now in force; False if the system lacks or refuses it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
    return True
