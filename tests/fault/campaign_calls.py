"""What the processes of a `crew.Crew` do in the fault campaign: one loop for every mode."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crew import drop_on_signal, slow_on_signal
from relaxed_calls import NormedNet, digest, local_step
from strangers import SECRET
from torch import Tensor, nn
from training import batches

from lightning_autosync.errors import ExchangeError, Expelled
from lightning_autosync.plan import SyncPlan
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.factory import open_synchronizer
from lightning_autosync.relaxed.server import ShardServer
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import describe

HEARTBEAT = HeartbeatSettings(interval=0.2, shortest=4.0, longest=6.0, redial=2.0)
"""Calm enough for a busy machine, which may keep a process waiting for seconds."""
TIMEOUT = 40.0
RESUMED_STEPS = 6


class Heavy(NormedNet):
    """A small network with ballast, so that a slow link is felt."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.zeros(30_000))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 0.01 * self.ballast.mean()


class Trainee:
    """One worker's model, and what trains it."""

    def __init__(self, store: dist.Store, rank: int, plan: SyncPlan, folder: str) -> None:
        torch.manual_seed(rank)
        self.store, self.rank, self.plan, self.folder = store, rank, plan, Path(folder)
        self.module = Heavy()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.5)
        self.data = itertools.cycle(list(batches(rank, 40, torch.float32)))

    def open(self, mesh: Mesh) -> Synchronizer:
        return open_synchronizer(
            self.plan, describe(self.module), self.module, mesh, optimizer=self.optimizer, timeout=TIMEOUT
        )

    def step(self, worker: Synchronizer) -> None:
        time.sleep(0.004 * (1 + self.rank))
        local_step(self.module, self.optimizer, next(self.data))
        worker.step(self.optimizer, 4)
        self.store.add(f"steps{self.rank}", 1)

    def meet(self, worker: Synchronizer) -> None:
        """Average with all; save; go on when all have."""
        worker.finish()
        worker.drain()
        self.store.set(f"met{self.rank}", f"{digest(self.module)} {self.finite} {worker.progress}")
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "synchronizer": worker.state_dict()}, self.folder / f"{self.rank}.ckpt")
        self.store.add("saved", 1)
        self.store.wait(["again"])
        worker.resume()

    def load(self, worker: Synchronizer) -> None:
        state = torch.load(self.folder / f"{self.rank}.ckpt", weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        worker.load_state_dict(state["synchronizer"])

    @property
    def finite(self) -> bool:
        return all(bool(value.isfinite().all()) for value in self.module.state_dict().values())


def open_mesh(store: dist.Store, rank: int, size: int, rejoin: bool) -> Mesh:
    mesh = Mesh.open(
        store, rank, size, secret=SECRET, address="127.0.0.1", heartbeat=HEARTBEAT, timeout=TIMEOUT, rejoin=rejoin
    )
    drop_on_signal(mesh, rank, store)
    slow_on_signal(mesh, store)
    return mesh


def train(
    store: dist.Store, rank: int, size: int, rejoin: bool, plan: dict[str, Any], folder: str
) -> dict[str, Any] | None:
    """Train, meet when the test says so, and train on until something ends it; who is given up comes back by itself."""
    made = SyncPlan.from_dict(plan)
    if rank >= made.world_size:
        return keep_shards(open_mesh(store, rank, size, False), store)
    trainee = Trainee(store, rank, made, folder)
    came = int(rejoin)
    while True:
        mesh, worker = open_mesh(store, rank, size, came > 0), None
        try:
            worker = trainee.open(mesh)
            worker.start()
            store.add("started", 1)
            while not store.check(["meet"]):
                trainee.step(worker)
            trainee.meet(worker)
            while True:
                trainee.step(worker)
        except ExchangeError as cause:
            error = cause
        given_up = isinstance(mesh.error, Expelled) or "expelled" in str(error)
        end(worker, mesh)
        if not given_up or rank == 0 or store.check(["again"]):
            return {"error": str(error), "finite": trainee.finite, "came_back": came}
        store.add("given up", 1)
        came += 1


def keep_shards(mesh: Mesh, store: dist.Store) -> dict[str, Any]:
    server = ShardServer(mesh)
    store.add("started", 1)
    server.wait()
    found = {"error": server.failure or str(mesh.error or ""), "finite": True, "came_back": 0}
    mesh.close()
    return found


def resume(
    store: dist.Store, rank: int, size: int, rejoin: bool, plan: dict[str, Any], folder: str
) -> dict[str, Any] | None:
    """Go on from the checkpoints of `train` for some steps."""
    made = SyncPlan.from_dict(plan)
    mesh = open_mesh(store, rank, size, False)
    if rank >= made.world_size:
        keep_shards(mesh, store)
        return None
    trainee = Trainee(store, rank, made, folder)
    worker = trainee.open(mesh)
    trainee.load(worker)
    worker.start()
    for _ in range(RESUMED_STEPS):
        trainee.step(worker)
    worker.finish()
    worker.drain()
    end(worker, mesh)
    return {"digest": digest(trainee.module), "finite": trainee.finite, "progress": worker.progress}


def end(worker: Synchronizer | None, mesh: Mesh) -> None:
    with suppress(ExchangeError):
        if worker is not None:
            worker.close()
    mesh.close()
