"""A job that is there already: this process is one rank of it."""

from __future__ import annotations

import os

from lightning_autosync.measure.workers.errors import LaunchError

_SPECIAL_STEPS = 0xFFFFFFF0
"""From here on SLURM numbers what srun has not started: batch scripts, allocations, daemons' own."""


def require_torchrun(verb: str) -> None:
    """Raise ``LaunchError`` unless torchrun started this process."""
    from torch.distributed import is_torchelastic_launched

    if not is_torchelastic_launched():
        raise LaunchError(
            "launch=torchrun: this process is not one of a torchrun job; start it on every node as "
            f"`torchrun --nnodes N ... --no-python autosync {verb} launch=torchrun`"
        )


def refuse_within_torchrun(launch: str) -> None:
    """Raise ``LaunchError`` if torchrun started this process: each of its ranks would start a job of its own."""
    from torch.distributed import is_torchelastic_launched

    if is_torchelastic_launched():
        raise LaunchError(f"launch={launch}: this process is one of a torchrun job already; take launch=torchrun")


def is_slurm_task() -> bool:
    """Whether srun started this process as one of several.

    A batch script has the number of the job's tasks and a place among them, too, though it is none of them: of a step
    it has nothing, or what stands for no step of srun's, by name or as a number out of range.
    """
    step = os.environ.get("SLURM_STEP_ID", "batch")
    by_srun = step.isdecimal() and int(step) < _SPECIAL_STEPS
    return by_srun and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
