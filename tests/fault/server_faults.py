"""What the processes of a `crew.Crew` do in the tests of parameter servers."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from strangers import SECRET
from torch import nn
from training import Net, batches

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.servers import server_layout
from lightning_autosync.relaxed.server import ParameterServer, ShardServer
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import describe, variable_names

TIMEOUT = 30.0
HEARTBEAT = HeartbeatSettings(interval=0.2, shortest=4.0, longest=6.0, redial=2.0)
"""Patient enough for a machine on which many tests run at once."""


def train(
    store: dist.Store,
    rank: int,
    size: int,
    rejoin: bool,
    plan: dict[str, Any],
    seconds: float,
    nodes: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Train for a while, then drain; says how it ended, with what weights, and how long the last call took."""
    made = SyncPlan.from_dict(plan)
    mesh = Mesh.open(
        store, rank, size, secret=SECRET, address="127.0.0.1", heartbeat=HEARTBEAT, timeout=30.0, rejoin=rejoin
    )
    if rank >= made.world_size:
        server = ShardServer(mesh)
        store.add("joined", 1)
        ended = server.wait(60.0)
        mesh.close()
        return {"ended": ended, "failure": server.failure}
    torch.manual_seed(rank)
    module = Net().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    layout = server_layout(made, describe(module))
    running = ParameterServer(
        mesh, variable_names(module), layout, optimizer, made.consistency, nodes=nodes, timeout=TIMEOUT
    )
    error, steps, began = "", 0, time.monotonic()
    try:
        running.start()
        store.add("joined", 1)
        end = time.monotonic() + seconds
        for images, labels in batches(rank, 100_000, torch.float64):
            began = time.monotonic()
            if began > end:
                break
            nn.functional.cross_entropy(module(images), labels).backward()
            running.step(optimizer, len(images))
            optimizer.zero_grad()
            steps += 1
            store.add(f"steps{rank}", 1)
            # Slow workers of different speeds, which leave other tests some of the cores.
            time.sleep(0.015 * (1 + rank))
        began = time.monotonic()
        running.finish()
        running.drain()
    except ExchangeError as caught:
        error = str(caught)
    took = time.monotonic() - began
    running.close()
    mesh.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return {
        "error": error,
        "at": time.time(),
        "took": took,
        "steps": steps,
        "digest": hashlib.sha256(weights).hexdigest(),
        "finite": all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()),
    }


def await_setup(store: dist.Store, rank: int, size: int, rejoin: bool) -> dict[str, Any]:
    """Rank 1 serves, and rank 0 never tells it what."""
    mesh = Mesh.open(
        store, rank, size, secret=SECRET, address="127.0.0.1", heartbeat=HEARTBEAT, timeout=30.0, rejoin=rejoin
    )
    if rank == 0:
        store.add("joined", 1)
        time.sleep(600.0)
    server = ShardServer(mesh)
    ended = server.wait(60.0)
    mesh.close()
    return {"ended": ended, "failure": server.failure}
