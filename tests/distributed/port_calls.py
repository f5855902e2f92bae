"""What ranks do in tests of the range of ports."""

from __future__ import annotations

import os

import torch.distributed as dist
from strangers import listening

from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.engine.secret import common_secret
from lightning_autosync.ports import listening_within
from lightning_autosync.relaxed.transport.mesh import Mesh


def connected(first: int, last: int) -> list[int]:
    """The ports on which this rank's peers listened."""
    rank, size = dist.get_rank(), dist.get_world_size()
    edges = [(low, high) for low in range(size) for high in range(low + 1, size)]
    with listening_within((first, last)):
        sockets = connect_pairs(edges, None, "127.0.0.1", 30.0)
    ports = [found.getpeername()[1] if rank < peer else found.getsockname()[1] for peer, found in sockets.items()]
    for found in sockets.values():
        found.close()
    return ports


def in_mesh(first: int, last: int) -> list[int]:
    """The port on which this rank listens for relaxed peers."""
    secret = common_secret()
    store = dist.PrefixStore(f"ports/{first}", dist.distributed_c10d._get_default_store())
    before = set(listening([os.getpid()]))
    with listening_within((first, last)):
        mesh = Mesh.open(store, dist.get_rank(), dist.get_world_size(), secret=secret, address="127.0.0.1")
    try:
        ports = [port for _, port in set(listening([os.getpid()])) - before]
        dist.barrier()
        return ports
    finally:
        mesh.close()
