"""One rank's replica of a module under a plan without a schedule: ranks talk when they are ready, not in step."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import AutoSyncError, ExchangeError, PeerLost, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.runtime.relaxed.base import Synchronizer
from lightning_autosync.runtime.relaxed.mesh import Mesh
from lightning_autosync.runtime.relaxed.opening import open_synchronizer
from lightning_autosync.runtime.relaxed.work import SharedWork
from lightning_autosync.runtime.rendezvous import gather_json, own_address
from lightning_autosync.strategy.agreement import agree
from lightning_autosync.strategy.broadcast import BufferBroadcast, broadcast_tensors, structure_digest
from lightning_autosync.strategy.resolution import Resolution, resolve
from lightning_autosync.strategy.settings import Settings

FORMAT = "autosync-relaxed/1"
"""Of the checkpoint's entry."""
STORE_PORT = "AUTOSYNC_PORT"
"""Environment variable: the port under which ``autosync serve`` finds the job."""
UNEVEN = ("partial_reduce", "asynchronous")
"""Modes in which a fast rank is not held up by a slow one, so that they should not have equal shares of the data."""


class RelaxedReplica:
    """Parameters and buffers of ``module`` that partial reduces, averages or servers keep together.

    Ranks meet only in `settle`; between two of them each may take another number of steps.

    Args:
        module: on its device and in its dtype.
        settings: what the user asked for; the plan has no schedule.
        nodes: number of the job's nodes.
        devices: ranks on each.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        ExchangeError: ranks cannot connect to each other.
    """

    engine = None
    schedule = None

    def __init__(self, module: nn.Module, settings: Settings, nodes: int, devices: int) -> None:
        self._module = module
        self._settings = settings
        self._resolution = self._resolve(nodes, devices)
        if not self.in_step:
            _check_module(module)
        broadcast_tensors([tensor.data for tensor in (*module.parameters(), *module.buffers())])
        self._store: dist.TCPStore | None = None
        self._mesh = self._meet()
        self.work = SharedWork(self._mesh, settings.timeout)
        self._synchronizer: Synchronizer | None = None
        self._buffers = BufferBroadcast(module) if self.in_step and settings.broadcast_buffers else None
        self._accumulating = False
        self._frozen: list[nn.Parameter] = []
        self._loaded: dict[str, Any] | None = None
        self._optimizer: Optimizer | None = None
        self._settled = True
        self._samples = 0
        self._busy = self._stepping = False
        found = self._resolution
        rank_zero_info(
            f"AutoSync: plan {found.plan.fingerprint} ({found.plan.consistency.mode}, {found.plan.world_size} ranks, "
            f"{found.workload.bytes / 1e6:.3g} MB): {found.reason}"
        )

    @property
    def plan(self) -> SyncPlan:
        return self._resolution.plan

    @property
    def synchronizer(self) -> Synchronizer | None:
        """What runs; None before the first step and after `close`."""
        return self._synchronizer

    @property
    def shares_data(self) -> bool:
        """Whether an epoch is dealt out among the ranks as they are ready for more."""
        return self.plan.consistency.mode in UNEVEN

    @property
    def in_step(self) -> bool:
        """Whether ranks march in step after all, for their servers wait for all of them."""
        return self.plan.consistency.mode == "synchronous"

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin to train, from rank 0's model or from what `restore_state` was given; all ranks do.

        Raises:
            PlanError: the optimizers are not one, or the servers cannot do what it does.
        """
        if self._synchronizer is not None:
            return
        if len(optimizers) != 1:
            raise PlanError(
                f"plan: consistency.mode '{self.plan.consistency.mode}' trains with one optimizer, the model has "
                f"{len(optimizers)}"
            )
        self._optimizer = optimizers[0]
        self._frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]
        found = self._resolution
        self._synchronizer = open_synchronizer(
            found.plan,
            found.workload,
            self._module,
            self._mesh,
            optimizer=self._optimizer,
            cluster=found.cluster,
            timeout=self._settings.timeout,
        )
        if self._loaded is not None:
            self._synchronizer.load_state_dict(self._loaded["synchronizer"])
            self._optimizer.load_state_dict(self._loaded["optimizer"])
            self._loaded = None
        self._synchronizer.start()

    def begin_pass(self) -> None:
        """Training goes on from here, on all ranks, even on one that will get no batch before they meet again."""
        if self._settled and self._synchronizer is not None:
            self._synchronizer.resume()
            self._settled = False

    def before_training(self, schedulers: Iterable[tuple[Any, int]], batch: Any) -> None:
        """Call before each forward pass of training, with the schedulers that advance every so many steps.

        Raises:
            PlanError: a parameter was unfrozen since `start`.
        """
        assert self._synchronizer is not None
        if any(parameter.requires_grad for parameter in self._frozen):
            raise PlanError(
                f"model: a parameter was unfrozen; under '{self.plan.consistency.mode}' those that train are the same "
                "from the beginning: unfreeze before fit(), or fit() again"
            )
        self.begin_pass()
        if self._buffers is not None:
            self._buffers.before_training(not self._accumulating)
        self._samples += batch_size(batch)
        for scheduler, frequency in schedulers:
            # What is at hand may stand for more steps than this rank has taken.
            while scheduler.last_epoch < self._synchronizer.progress // frequency:
                scheduler.step()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the user's training step, in which collective calls would never be answered."""
        before, self._busy = self._busy, not self.in_step
        try:
            yield
        finally:
            self._busy = before

    def before_collective(self, what: str) -> None:
        """Meet all ranks, for they are about to make a collective call together.

        Raises:
            ExchangeError: it comes from inside a training step, at which other ranks need not be.
        """
        if self._stepping and self.in_step:
            return
        if self._busy:
            raise ExchangeError(
                f"{what} inside a training step: under '{self.plan.consistency.mode}' the other ranks are at other "
                "steps, and would not answer; log with on_step=False, or without sync_dist"
            )
        self.settle()

    def before_evaluation(self) -> None:
        """Call before validation."""
        self.settle()
        if self._buffers is not None:
            self._buffers.before_evaluation()

    @contextmanager
    def backward(self, scaler: Any = None) -> Iterator[None]:
        """Around a backward pass, which stays on this rank."""
        yield

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Around a backward pass whose gradients are kept for a later step."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, ``optimizer.step(closure)`` computes gradients and hands them to the synchronizer."""
        own = optimizer.step
        wrapped = "step" in vars(optimizer)

        def step(closure: Any = None, **_: Any) -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            # The synchronizer may step the optimizer itself.
            optimizer.step = own  # type: ignore[method-assign]
            assert self._synchronizer is not None
            self._synchronizer.step(optimizer, self._samples)
            self._samples = 0
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        self._stepping, self._busy = True, not self.in_step
        try:
            yield
        finally:
            self._stepping = self._busy = False
            if wrapped:
                optimizer.step = own  # type: ignore[method-assign]
            else:
                del optimizer.step

    def settle(self) -> None:
        """Meet all ranks and leave with the same model on each; nothing if no step was made since."""
        if self._settled or self._synchronizer is None:
            return
        self._synchronizer.drain()
        self._settled = True

    def gather_state(self) -> dict[str, Any] | None:
        """The checkpoint's entry on rank 0, None elsewhere: what every rank needs to go on; collective.

        Plain values and tensors, readable with ``torch.load(weights_only=True)``.
        """
        if self._synchronizer is None or self._optimizer is None:
            rank_zero_warn("this checkpoint is made outside of fit(): it has no state of the synchronization")
            return None
        self.settle()
        # Servers hand their whole state to whoever asks; one copy is enough.
        asks = self._mesh.rank == 0 or self.plan.consistency.mode in ("partial_reduce", "periodic")
        state = self._synchronizer.state_dict() if asks else None
        own = {"synchronizer": state, "optimizer": self._optimizer.state_dict()}
        if self._mesh.rank != 0:
            content = _encode(own)
            self._mesh.send(0, "checkpoint", {}, [memoryview(content)]).wait(self._settings.timeout)
            return None
        ranks: dict[int, Any] = {0: own}
        for rank in sorted(self._trainers() - {0}):
            with suppress(PeerLost):  # it will go on as rank 0 did
                mail = self._mesh.receive("checkpoint", sender=rank, timeout=self._settings.timeout)
                ranks[rank] = torch.load(io.BytesIO(mail.payload), weights_only=True)
        return {"format": FORMAT, "plan": self.plan.consistency.mode, "ranks": ranks}

    def restore_state(self, entry: dict[str, Any]) -> None:
        """Go on from what `gather_state` returned, a rank that was lost then as rank 0; before the first step.

        Raises:
            PlanError: the entry is of another kind of plan.
        """
        mode = self.plan.consistency.mode
        found = (entry.get("format"), entry.get("plan"))
        if found != (FORMAT, mode):
            raise PlanError(f"checkpoint: it holds the state of '{found[1]}' ({found[0]}); this plan is '{mode}'")
        ranks = entry["ranks"]
        own = ranks.get(self._mesh.rank, ranks[0])
        self._loaded = {**own, "synchronizer": own["synchronizer"] or ranks[0]["synchronizer"]}

    def close(self) -> None:
        """Leave the others."""
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None
        self.work.close()
        self._mesh.close()
        self._store = None

    def _resolve(self, nodes: int, devices: int) -> Resolution:
        def identify(resolution: Resolution) -> dict[str, str]:
            return {
                "model (names, shapes and dtypes of parameters and buffers)": structure_digest(self._module),
                "plan": resolution.plan.fingerprint,
                "cluster": resolution.cluster.fingerprint,
            }

        return agree(lambda: resolve(self._settings, self._module, nodes, devices), identify)

    def _meet(self) -> Mesh:
        """Open the mesh of all ranks and servers, over a store that rank 0 holds as long: servers may come late."""
        rank, found = dist.get_rank(), self._resolution
        waiting = timedelta(seconds=self._settings.timeout)
        host, fault = "", ""
        if rank == 0:
            try:
                host = own_address()
                port = _store_port(found.plan)
                self._store = dist.TCPStore(host, port, is_master=True, timeout=waiting, wait_for_workers=False)
            except (AutoSyncError, RuntimeError, ValueError) as cause:
                fault = str(cause).splitlines()[0]
        place = gather_json([host, self._store.port if self._store is not None else 0, fault])[0]
        if place[2]:
            raise ExchangeError(f"rank 0 cannot open the store that ranks and servers meet at: {place[2]}")
        store = self._store or dist.TCPStore(place[0], place[1], is_master=False, timeout=waiting)
        node = found.cluster.nodes[found.cluster.rank_nodes[rank]]
        size = found.plan.world_size + found.plan.servers
        return Mesh.open(store, rank, size, address=node.address, timeout=self._settings.timeout)

    def _trainers(self) -> set[int]:
        return {rank for rank in self._mesh.live if rank < self.plan.world_size}


def _store_port(plan: SyncPlan) -> int:
    """The port under which servers find the job; any will do where there are none."""
    given = os.environ.get(STORE_PORT, "")
    if plan.servers and not given:
        raise PlanError(
            f"plan: servers: {plan.servers} server-only ranks must find the job: set {STORE_PORT} to a port and start "
            "`autosync serve` for each"
        )
    return int(given or 0)


def batch_size(batch: Any) -> int:
    """Samples in a batch: the extent of the first axis of the first tensor in it; 1 if there is none."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _check_module(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                f"model: '{name}' is a SyncBatchNorm, which needs all ranks in every step; replicas that do not march "
                "in step need plain BatchNorm (sync_batchnorm=False)"
            )


def _encode(state: dict[str, Any]) -> bytearray:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return bytearray(buffer.getbuffer())
