"""What the processes of a `crew.Crew` do in tests of who comes to a job."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_autosync.engine.rendezvous import Rendezvous, checked_rendezvous
from lightning_autosync.errors import ExchangeError

HOST = "127.0.0.1"


def come(
    store: dist.TCPStore,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    ranks: list[int | None],
    dies: int | None = None,
    timeout: float = 2.0,
) -> Any:
    """Form a group as the rank that ``ranks`` says; None does not come. The error, or the group's size.

    Args:
        dies: the rank that is killed once all have come.
    """
    claimed = ranks[rank]
    if claimed is None:
        return ""
    try:
        with checked_rendezvous(Rendezvous(HOST, port, claimed, size, timeout)):
            if claimed == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.init_process_group(
                "gloo", f"tcp://{HOST}:{port}", timeout=timedelta(seconds=timeout), rank=claimed, world_size=size
            )
            dist.barrier()
    except ExchangeError as cause:
        return str(cause)
    return dist.get_world_size()
