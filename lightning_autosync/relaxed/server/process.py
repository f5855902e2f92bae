"""A process that serves and trains nothing."""

from __future__ import annotations

import torch.distributed as dist

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.mesh import HeartbeatSettings, Mesh
from lightning_autosync.relaxed.server.server import ShardServer


def serve(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    secret: bytes,
    address: str | None = None,
    timeout: float = 600.0,
    heartbeat: HeartbeatSettings | None = None,
) -> None:
    """Keep and update the shards that the plan places on this process, until the last worker has left.

    Args:
        store: the store at which all processes of the job meet.
        rank: the own rank; those of server-only processes follow the workers'.
        size: workers and server-only processes together.
        secret: the job's.
        address: the own address in the cluster's network; by default the one that faces ``MASTER_ADDR``.
        timeout: seconds that meeting the others may take.
        heartbeat: when a silent process is given up.

    Raises:
        ExchangeError: the others could not be met, have given this process up, or the server could not go on, as when
            its last worker was lost.
    """
    mesh = Mesh.open(store, rank, size, secret=secret, address=address, timeout=timeout, heartbeat=heartbeat)
    try:
        server = ShardServer(mesh)
        server.wait()
        if mesh.error is not None:
            raise mesh.error
    finally:
        mesh.close()
    if server.failure:
        raise ExchangeError(server.failure)
