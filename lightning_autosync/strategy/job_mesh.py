"""The mesh of a Trainer's job: its ranks, and the processes of ``autosync serve`` that its plan places on."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from lightning_autosync.errors import AutoSyncError, ExchangeError, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.runtime.relaxed.mesh import Mesh
from lightning_autosync.runtime.rendezvous import gather_json, own_address
from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.strategy.settings import Settings

STORE_PORT = "AUTOSYNC_PORT"
"""Environment variable: the port under which ``autosync serve`` finds the job."""


def open_mesh(found: Resolution, settings: Settings) -> tuple[Mesh, dist.TCPStore | None]:
    """Meet all ranks and servers, and the store that they met at, on rank 0, which holds it: servers may come late.

    Collective.

    Raises:
        ExchangeError: they cannot connect to each other.
    """
    rank = dist.get_rank()
    waiting = timedelta(seconds=settings.timeout)
    own: dist.TCPStore | None = None
    host, fault = "", ""
    if rank == 0:
        try:
            host = own_address()
            port = _store_port(found.plan)
            own = dist.TCPStore(host, port, is_master=True, timeout=waiting, wait_for_workers=False)
        except (AutoSyncError, RuntimeError, ValueError) as cause:
            fault = str(cause).splitlines()[0]
    place = gather_json([host, own.port if own is not None else 0, fault])[0]
    if place[2]:
        raise ExchangeError(f"rank 0 cannot open the store that ranks and servers meet at: {place[2]}")
    store = own or dist.TCPStore(place[0], place[1], is_master=False, timeout=waiting)
    node = found.cluster.nodes[found.cluster.rank_nodes[rank]]
    size = found.plan.world_size + found.plan.servers
    mesh = Mesh.open(store, rank, size, address=node.address, timeout=settings.timeout, heartbeat=settings.heartbeat)
    return mesh, own


def _store_port(plan: SyncPlan) -> int:
    """The port under which servers find the job; any will do where there are none."""
    given = os.environ.get(STORE_PORT, "")
    if plan.servers and not given:
        raise PlanError(
            f"plan: servers: {plan.servers} server-only ranks must find the job: set {STORE_PORT} to a port and start "
            "`autosync serve` for each"
        )
    return int(given or 0)
