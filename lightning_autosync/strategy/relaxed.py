"""One rank's replica of a module under a plan without a schedule: ranks talk when they are ready, not in step."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import ExchangeError, PeerLost, PlanError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.runtime.broadcast import BufferBroadcast, broadcast_tensors
from lightning_autosync.runtime.relaxed.base import Synchronizer
from lightning_autosync.runtime.relaxed.opening import open_synchronizer
from lightning_autosync.runtime.relaxed.work import SharedWork
from lightning_autosync.strategy.checkpoint import RELAXED_FORMAT
from lightning_autosync.strategy.collectives import refused_collectives
from lightning_autosync.strategy.job_mesh import open_mesh
from lightning_autosync.strategy.lockstep import check_module
from lightning_autosync.strategy.resolution import resolve_together
from lightning_autosync.strategy.schedules import ProgressSchedules
from lightning_autosync.strategy.served_state import state_by_name, with_state
from lightning_autosync.strategy.settings import Settings
from lightning_autosync.strategy.shared_data import batch_size
from lightning_autosync.workload import variable_names

UNEVEN = ("partial_reduce", "asynchronous")
"""Modes in which a fast rank is not held up by a slow one, so that they should not have equal shares of the data."""
AVERAGING = ("partial_reduce", "periodic")
"""Modes in which each rank steps its own optimizer; in the others servers step, and keep the optimizer's state."""


class RelaxedReplica:
    """Parameters and buffers of ``module`` that partial reduces, averages or servers keep together.

    Ranks meet only in `settle`; between two of them each may take another number of steps.

    Args:
        module: on its device and in its dtype.
        settings: what the user asked for; the plan has no schedule.
        nodes: number of the job's nodes.
        devices: ranks on each.

    Attributes:
        share: batches of an epoch, divided by ranks, where they are dealt out; None where they are not.
        schedules: learning-rate schedules that follow the job's progress; None if they follow this rank's steps.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        ExchangeError: ranks cannot connect to each other.
    """

    engine = None
    schedule = None

    def __init__(self, module: nn.Module, settings: Settings, nodes: int, devices: int) -> None:
        self._module = module
        self._settings = settings
        self._resolution = found = resolve_together(settings, module, nodes, devices)
        if not self.in_step:
            check_module(module)
        broadcast_tensors([tensor.data for tensor in (*module.parameters(), *module.buffers())])
        self._mesh, self._store = open_mesh(found, settings)
        self._lost: dict[int, str] = {}
        self._mesh.on_loss(self._lost.__setitem__)
        self.work = SharedWork(self._mesh, found.plan.world_size, settings.timeout)
        self.share: int | None = None
        self.schedules: ProgressSchedules | None = None
        self._synchronizer: Synchronizer | None = None
        self._buffers = BufferBroadcast(module) if self.in_step and settings.broadcast_buffers else None
        self._accumulating = False
        self._frozen: list[nn.Parameter] = []
        self._names: dict[Tensor, str] = {}
        self._loaded: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None
        self._optimizer: Optimizer | None = None
        self._settled = True
        self._apart = False
        """Whether this rank has begun a step since all met."""
        self._guard = ExitStack()
        """From then on, while ranks are at steps of their own, a collective call would not be answered."""
        self._samples = 0
        self._busy = self._stepping = False
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
        """Whether an epoch should be dealt out among the ranks as they are ready for more."""
        return self.plan.consistency.mode in UNEVEN

    @property
    def dealt_out(self) -> bool:
        """Whether an epoch's data is dealt out, so that each rank takes another number of batches."""
        return self.share is not None

    @property
    def in_step(self) -> bool:
        """Whether ranks march in step after all, for their servers wait for all of them."""
        return self.plan.consistency.mode == "synchronous"

    @property
    def served(self) -> bool:
        """Whether servers make the steps and keep the optimizer's state."""
        return self.plan.consistency.mode not in AVERAGING

    @property
    def progress(self) -> int:
        """Steps that the model held here stands for."""
        return 0 if self._synchronizer is None else self._synchronizer.progress

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
                f"{len(optimizers)}; allowed: one, with parameter groups"
            )
        self._optimizer = optimizers[0]
        self._names = {parameter: name for name, parameter in variable_names(self._module)}
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
            stall=self._settings.stall,
        )
        self._load(self._synchronizer, self._optimizer)
        self._synchronizer.start()

    def begin_pass(self) -> None:
        """Training goes on from here, on all ranks, even on one that will get no batch before they meet again."""
        if self._settled and self._synchronizer is not None:
            self._synchronizer.resume()
            self._settled = False

    def before_training(self, batch: Any) -> None:
        """Call before each forward pass of training.

        Raises:
            PlanError: a parameter was unfrozen since `start`.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise PlanError(
                f"model: a parameter was unfrozen; under '{self.plan.consistency.mode}' those that train are the same "
                "from the beginning: unfreeze before fit(), or fit() again"
            )
        self.begin_pass()
        if not self._apart and not self.in_step:
            self._guard.enter_context(refused_collectives(self._refused_call))
        self._apart = True
        if self._buffers is not None:
            self._buffers.before_training(not self._accumulating)
        self._samples += batch_size(batch)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the user's training step, in which collective calls would never be answered."""
        before, self._busy = self._busy, not self.in_step
        try:
            yield
        finally:
            self._busy = before

    def meet(self, what: str, at_meeting: bool, each_step: bool = False) -> None:
        """Settle, for something is about to be done on all ranks together.

        Args:
            what: that which errors name.
            at_meeting: whether all ranks come here in any case, however many batches each has taken.
            each_step: whether it is done after every step, if after one at all; then all would settle each time, and
                little would be left of what is relaxed.

        Raises:
            ExchangeError: it comes from inside a training step, or between two of them where ranks take unequal
                numbers of steps, for there the others need not be; or between two and after ``each_step``.
        """
        if self._synchronizer is None or (self._stepping and self.in_step):
            return
        between = self._apart and not at_meeting
        if self._busy or (between and (self.dealt_out or (each_step and not self.in_step))):
            raise self._refusal(what, "log with on_step=False and on_epoch=True, or without sync_dist")
        self.settle()

    def _refusal(self, what: str, instead: str) -> ExchangeError:
        where = "inside a training step" if self._busy else "between training steps"
        return ExchangeError(
            f"{what} {where}: under '{self.plan.consistency.mode}' the other ranks are at other steps, and would not "
            f"answer, or only by waiting for each other; {instead}, and do the rest at the end of an epoch"
        )

    def _refused_call(self, name: str) -> ExchangeError:
        return self._refusal(name, "do what needs no other rank")

    def before_collective(self, what: str, at_meeting: bool, each_step: bool = False) -> None:
        """As `meet`, for they are about to make a collective call together, which needs them all.

        Raises:
            ExchangeError: as `meet`; or a rank is lost.
        """
        self.meet(what, at_meeting, each_step)
        if self._synchronizer is not None and self._lost:
            if self._mesh.error is not None:
                raise self._mesh.error
            lost = "; ".join(f"rank {rank} is lost ({why})" for rank, why in sorted(self._lost.items()))
            # Lightning's callback for checkpoints asks all ranks before it writes.
            raise ExchangeError(
                f"{what} needs all ranks: {lost}; a checkpoint that is due now may be missing: go on from the last "
                "that there is"
            )

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
        before = self._stepping, self._busy
        self._stepping, self._busy = True, not self.in_step
        try:
            yield
        finally:
            # With manual optimization, the training step goes on.
            self._stepping, self._busy = before
            if wrapped:
                optimizer.step = own  # type: ignore[method-assign]
            else:
                del optimizer.step

    def settle(self) -> None:
        """Meet all ranks and leave with the same model on each; nothing if no step was made since."""
        if self._settled or self._synchronizer is None:
            return
        self._synchronizer.drain()
        self._settled, self._apart = True, False
        self._guard.close()
        # A loss may be known there before this rank hears of it; and who leaves in good order is not lost at all.
        for rank in set(range(self.plan.world_size)) - self._synchronizer.met:
            self._lost.setdefault(rank, "it did not come to the meeting of all")
        if self._lost:
            rank_zero_warn(f"ranks {', '.join(map(str, sorted(self._lost)))} are lost; the others have gone on so far")
        if self.schedules is not None:
            self.schedules.follow()

    # Checkpoints

    def optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own state (``saved``) with what servers keep of it, on rank 0; all ranks must have met."""
        if self._synchronizer is None or self._optimizer is None or not self.served or self._mesh.rank != 0:
            return saved
        state = self._synchronizer.state_dict()
        self._position = {"step": state["step"], "progress": state["progress"]}
        return with_state(saved, self._optimizer, self._names, state["optimizer"])

    def gather_state(self) -> dict[str, Any] | None:
        """The checkpoint's entry on rank 0, None elsewhere: what every rank needs to go on; collective.

        Plain values and tensors, readable with ``torch.load(weights_only=True)``. Comes after `optimizer_state`.
        """
        if self._synchronizer is None or self._optimizer is None:
            left = ", nor any of the optimizer, which servers kept" if self.served else ""
            rank_zero_warn(f"this checkpoint is made outside of fit(): it has no state of the synchronization{left}")
            return None
        self.settle()
        if self.served:
            if self._mesh.rank != 0:
                return None
            state, self._position = self._position or self._synchronizer.state_dict(), None
            return self._entry({0: {"synchronizer": {name: state[name] for name in ("step", "progress")}}})
        own = {"synchronizer": self._synchronizer.state_dict(), "optimizer": self._optimizer.state_dict()}
        if self._mesh.rank != 0:
            content = _encode(own)
            self._mesh.send(0, "checkpoint", {}, [memoryview(content)]).wait(self._settings.timeout)
            return None
        ranks: dict[int, Any] = {0: own}
        for rank in sorted(self._trainers() - {0}):
            with suppress(PeerLost):  # it will go on as rank 0 did
                mail = self._mesh.receive("checkpoint", sender=rank, timeout=self._settings.timeout)
                ranks[rank] = torch.load(io.BytesIO(mail.payload), weights_only=True)
        return self._entry(ranks)

    def restore_state(self, entry: dict[str, Any] | None, steps: int) -> None:
        """Go on from what `gather_state` returned, a rank that was lost then as rank 0; before the first step.

        The optimizer has its state already. From a checkpoint of another kind of plan, what only this kind keeps begins
        anew, as after ``steps`` steps.

        Raises:
            PlanError: the entry is of another version.
        """
        mode = self.plan.consistency.mode
        kind = str((entry or {}).get("format", ""))
        if entry is not None and kind != RELAXED_FORMAT and kind.startswith(RELAXED_FORMAT.split("/")[0] + "/"):
            raise PlanError(
                f"checkpoint: its state is '{kind}', and this version reads '{RELAXED_FORMAT}'; go on with the version "
                "that made it, or load its weights alone"
            )
        found = entry["plan"] if entry is not None and kind == RELAXED_FORMAT else "a plan in step, exact or compressed"
        if entry is not None and found == mode:
            ranks = entry["ranks"]
            self._loaded = ranks.get(self._mesh.rank, ranks[0])
        elif self.served:
            self._loaded = {"synchronizer": {"step": steps, "progress": float(steps)}}
        else:
            rank_zero_warn(
                f"the checkpoint was made under '{found}': every rank goes on from its model and its optimizer's "
                f"state, and the rest of what '{mode}' keeps begins anew"
            )

    def close(self) -> None:
        """Leave the others."""
        self._guard.close()
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None
        self.work.close()
        self._mesh.close()
        self._store = None

    def _load(self, synchronizer: Synchronizer, optimizer: Optimizer) -> None:
        """Give a new synchronizer what `restore_state` got, and servers what the optimizer remembers."""
        loaded, self._loaded = self._loaded, None
        if self.served:
            position = {"step": 0, "progress": 0.0} if loaded is None else loaded["synchronizer"]
            # Rank 0 tells the servers what to begin with; the others look at theirs, so that all refuse what is wrong.
            synchronizer.load_state_dict({**position, "optimizer": state_by_name(optimizer, self._names)})
            optimizer.state.clear()
        elif loaded is not None:
            synchronizer.load_state_dict(loaded["synchronizer"])
            optimizer.load_state_dict(loaded["optimizer"])

    def _entry(self, ranks: dict[int, Any]) -> dict[str, Any]:
        return {"format": RELAXED_FORMAT, "plan": self.plan.consistency.mode, "ranks": ranks}

    def _trainers(self) -> set[int]:
        return {rank for rank in self._mesh.live if rank < self.plan.world_size}


def _encode(state: dict[str, Any]) -> bytearray:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return bytearray(buffer.getbuffer())
