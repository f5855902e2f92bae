"""What ends a sweep, told without a traceback; first of all a sweep that every rank of a job would run."""

from __future__ import annotations

import os

from hydra.errors import CompactHydraException


class SweepError(CompactHydraException):
    """A sweep cannot be begun or went wrong; Hydra prints the message alone."""


class SweepInterrupted(SweepError):  # noqa: N818 - an event, named as one
    """Somebody ended a sweep with a Ctrl-C.

    Attributes:
        status: exit status, as shells have it.
    """

    status = 130


def refuse_within_rank() -> None:
    """Refuse to sweep in a process that was launched as one rank of several.

    Every rank would run the whole sweep, each with trials of its own, and train on what the others do not.

    Raises:
        SweepError: this is such a process.
    """
    if "LOCAL_RANK" in os.environ:
        raise SweepError(
            "a sweep within a rank: LOCAL_RANK is set, so every rank of this job would run the whole sweep. Start the "
            "sweep outside of torchrun; with hydra/launcher=autosync_torchrun each trial is a torchrun job of its own. "
            "Under Lightning's own launch of ranks (strategies ddp, autosync) a sweep needs that launcher, too"
        )
