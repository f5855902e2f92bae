"""The hosts' constants where ranks share this machine and compute by the clock."""

from __future__ import annotations

import os

from lightning_autosync.simulator import Constants
from lightning_autosync.workers.emulation import BURST

_BURST = 1024 * int(BURST.removesuffix("kb"))
"""Bytes, as the emulated links' token buckets are set."""


def shared_hosts(path: str | None = None, cores: float | None = None) -> Constants:
    """The constants in a probe's file, or the defaults on ``cores`` (None: all of this machine's) and emulated links.

    Paced gradients take no core, as those of an accelerator.

    Raises:
        DocumentError: the file is not one of constants.
    """
    if path is not None:
        return Constants.load(path).model_copy(update={"accelerated": True})
    return Constants(cores=cores or os.cpu_count(), burst=_BURST, accelerated=True)
