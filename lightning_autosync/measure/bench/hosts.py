"""The hosts' constants of a job, by where its ranks run."""

from __future__ import annotations

from lightning_autosync.measure.emulation.shared_hosts import shared_hosts
from lightning_autosync.measure.workers.cores import usable_cores
from lightning_autosync.replay import Constants


def job_hosts(launch: str, paced: bool, path: str | None = None) -> Constants:
    """Constants with which a job is replayed.

    Args:
        launch: kind of the launch. Ranks that it puts on this machine share its cores; only emulated links have the
            burst of token buckets.
        paced: whether computation goes by the clock, and so takes no core, as that of an accelerator.
        path: a file of constants from a probe; None takes the defaults.

    Raises:
        DocumentError: the file is not one of constants.
    """
    if path is not None:
        known = Constants.load(path)
    elif launch == "emulated":
        known = shared_hosts()
    else:
        known = Constants(cores=usable_cores() if launch == "local" else None)
    return known.model_copy(update={"accelerated": paced})
