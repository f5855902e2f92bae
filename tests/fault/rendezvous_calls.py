"""What the processes of a `crew.Crew` do in tests of who comes to a job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from strangers import listening

from lightning_autosync.engine import rendezvous as stores
from lightning_autosync.engine.failure_detector import open_failure_detector
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
    stops: str = "",
    host: str = HOST,
    timeout: float = 2.0,
) -> Any:
    """Form a group as the rank that ``ranks`` says; None does not come.

    The error, or the group's size and the addresses on which this process listens at the job's port.

    Args:
        dies: the rank that is killed once all have come.
        host: rank 0's host.
        stops: the step before which rank 0 is stopped; see `stop_first`.
    """
    claimed = ranks[rank]
    if claimed is None:
        return ""
    if stops:
        stop_first(store, claimed, sum(other is not None for other in ranks), stops)
    try:
        with checked_rendezvous(Rendezvous(host, port, claimed, size, timeout)):
            if claimed == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.init_process_group(
                "gloo", f"tcp://{host}:{port}", timeout=timedelta(seconds=timeout), rank=claimed, world_size=size
            )
            dist.barrier()
    except ExchangeError as cause:
        return str(cause)
    return [dist.get_world_size(), sorted({place for place, at in listening([os.getpid()]) if at == port})]


def connect(store: dist.TCPStore, rank: int, size: int, rejoin: bool, port: int, secrets: list[str]) -> str:
    """Form a group and open a failure detector with the secret that this rank is given; the error, or nothing."""
    os.environ["AUTOSYNC_SECRET"] = secrets[rank]
    waiting = timedelta(seconds=60.0)
    dist.init_process_group("gloo", f"tcp://{HOST}:{port}", timeout=waiting, rank=rank, world_size=size)
    try:
        detector = open_failure_detector(None, 60.0, HOST)
        assert detector is not None
    except ExchangeError as cause:
        return str(cause)
    detector.close()
    return ""


def stop_first(store: dist.TCPStore, rank: int, size: int, step: str) -> None:
    """Let rank 0, which holds the ranks' store, be stopped before a step of the rendezvous that all have reached.

    Args:
        store: the store of the test, which outlives rank 0.
        rank: rank of this process.
        size: number of ranks that come.
        step: ``_sign_in`` (the others then ask a store that does not answer any more) or ``_is_there`` (rank 0 is
            stopped when they wait there).
    """
    place = {"_sign_in": stores._SignIn, "_is_there": stores}[step]
    original: Callable[..., Any] = getattr(place, step)
    waits = (rank == 0) == (step == "_is_there")

    def stopped(*arguments: Any) -> Any:
        store.add("reached", 1)
        while store.add("reached", 0) < size:
            time.sleep(0.01)
        time.sleep(0.5 if waits else 0.0)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments)

    mock.patch.object(stores, "ANSWER_TIMEOUT", 2.0).start()
    mock.patch.object(place, step, stopped).start()
