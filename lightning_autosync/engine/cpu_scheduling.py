"""How a process shares its cores with others: the kernel's scheduling policy, and the threads of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch and DGL compute on the calling thread alone, within the block or the decorated function."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
