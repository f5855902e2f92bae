"""What the processes of a `crew.Crew` do in fault tests of partial reduce and periodic averaging."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from relaxed_calls import NormedNet, digest, local_step, make_worker
from strangers import SECRET
from training import batches

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh

HEARTBEAT = HeartbeatSettings(interval=0.2, shortest=3.0, longest=6.0, redial=3.0)
"""Calm enough for a busy machine, which may keep a process waiting for a second."""


def train(
    store: dist.Store, rank: int, size: int, rejoin: bool, settings: dict[str, Any], pauses: list[float]
) -> dict[str, Any]:
    """Train until the test says "finish"; a process that was given up comes back by itself, as often as it takes."""
    came, error = int(rejoin), ""
    slowest, last = 0.0, time.monotonic()
    torch.manual_seed(rank)
    data = list(batches(rank, 40, torch.float64))
    module = NormedNet().double()
    while True:
        mesh = Mesh.open(
            store, rank, size, secret=SECRET, address="127.0.0.1", heartbeat=HEARTBEAT, timeout=60.0, rejoin=came > 0
        )
        worker = make_worker(mesh, module, settings)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        try:
            worker.start()
            store.add(f"started{rank}", 1)
            for batch in itertools.cycle(data):
                if store.check(["finish"]):
                    break
                time.sleep(pauses[rank])
                local_step(module, optimizer, batch)
                worker.step(optimizer, 4)
                store.add(f"steps{rank}", 1)
                slowest, last = max(slowest, time.monotonic() - last), time.monotonic()
            worker.finish()
            worker.drain()
        except ExchangeError as cause:
            given_up = type(cause).__name__ == "Expelled" or "expelled" in str(cause)
            if given_up and rank > 0:
                came += 1
                mesh.close()
                continue
            error = f"{type(cause).__name__}: {cause}"
        finite = all(bool(value.isfinite().all()) for value in module.parameters())
        found = {"error": error, "digest": digest(module), "finite": finite, "slowest": slowest, "came_back": came}
        worker.close()
        mesh.close()
        return found | {"progress": worker.progress}
