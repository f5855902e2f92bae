"""One rank's replica of a module: what keeps it equal to the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.runtime import Engine
from lightning_autosync.runtime.broadcast import BufferBroadcast, broadcast_tensors
from lightning_autosync.runtime.memories import Memories
from lightning_autosync.strategy.checkpoint import gather_state, own_state, warn_left_out
from lightning_autosync.strategy.resolution import Resolution, memory_fault, resolve_together
from lightning_autosync.strategy.settings import Settings
from lightning_autosync.workload import variable_names


class Replica:
    """Gradients, parameters and buffers of ``module`` under a plan; collective, as are most of its methods.

    Args:
        module: on its device and in its dtype.
        settings: what the user asked for.
        nodes: number of the job's nodes.
        devices: ranks on each.
        group: process group of all ranks; None is the default one.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        ExchangeError: ranks cannot connect to each other.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        nodes: int,
        devices: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._settings = settings
        self._shape = (nodes, devices)
        self._group = group
        self._memory: Memories = {}
        self._resolution = self._resolve()
        broadcast_tensors([tensor.data for tensor in (*module.parameters(), *module.buffers())], group)
        self._buffers = BufferBroadcast(module, group) if settings.broadcast_buffers else None
        self._engine: Engine | None = self._start()

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def plan(self) -> SyncPlan:
        return self._resolution.plan

    @property
    def schedule(self) -> Schedule:
        assert self._resolution.schedule is not None
        return self._resolution.schedule

    @property
    def engine(self) -> Engine | None:
        """The engine; None after `close`."""
        return self._engine

    def before_training(self) -> None:
        """Call before each forward pass of training."""
        self.follow_unfreezing()
        if self._buffers is not None and self._engine is not None:
            self._buffers.before_training(self._engine.enabled)

    def before_evaluation(self) -> None:
        """Call before validation."""
        if self._buffers is not None and self._engine is not None:
            self._buffers.before_evaluation()

    def follow_scaler(self, scaler: GradScaler | None) -> None:
        """Call before each backward pass with what scales its loss, if anything does."""
        engine = self._engine
        # Reading the scale waits for an accelerator, so it is left where nothing depends on it.
        if engine is not None and engine.has_residuals:
            scales = scaler is not None and scaler.is_enabled()
            engine.loss_scale = scaler.get_scale() if scaler is not None and scales else None

    @contextmanager
    def backward(self, scaler: GradScaler | None = None) -> Iterator[None]:
        """Around everything that belongs to one backward pass; after it, gradients are means over ranks.

        Args:
            scaler: what scales the loss.
        """
        self.follow_unfreezing()
        self.follow_scaler(scaler)
        engine = self._engine
        if engine is None:
            yield
            return
        engine.deferred = True
        try:
            yield
            engine.finish()
        except BaseException as error:
            engine.interrupt(error)
            raise
        finally:
            engine.deferred = False

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's step, which needs nothing: gradients are means over ranks already."""
        yield

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients locally."""
        before = self._set_enabled(False)
        try:
            yield
        finally:
            self._set_enabled(before)

    def follow_unfreezing(self) -> None:
        """Take parameters that were unfrozen since into the plan; costs nothing where none are frozen.

        What compressors remember stays, but for variables that the new plan treats in another way.

        Raises:
            PlanError: the user's own plan does not have them.
        """
        if not any(parameter.requires_grad for parameter in self._frozen):
            return
        if self._settings.fixed:
            planned = {name for group in self.plan.groups for name in group.variables}
            new = [name for name, _ in variable_names(self._module) if name not in planned]
            raise PlanError(
                f"{self._settings.source}: groups: parameter '{new[0]}' was unfrozen but is in no group "
                f"({len(new)} such); make the plan for the model as it is after unfreezing, or give none"
            )
        enabled = self._set_enabled(True)
        self.close()
        self._resolution = self._resolve()
        self._engine = self._start()
        self._engine.enabled = enabled
        warn_left_out(self._engine.load_state_dict(self._memory), "the plan was made anew after unfreezing")

    def gather_state(self) -> dict[str, Any] | None:
        """What compressors remember on all ranks, for a checkpoint; see `checkpoint.gather_state`."""
        state = self._memory if self._engine is None else self._engine.state_dict()
        return gather_state(state, self._group)

    def restore_state(self, entry: dict[str, Any]) -> None:
        """Take up what `gather_state` returned, under this plan or another; a warning names what does not fit."""
        if self._engine is not None:
            state = own_state(entry, self._group)
            warn_left_out(self._engine.load_state_dict(state), "the checkpoint was made under another plan")

    def close(self) -> None:
        """Stop synchronizing; what compressors remember stays for `gather_state`."""
        if self._engine is None:
            return
        self._memory = self._engine.state_dict()
        self._engine.close()
        self._engine = None

    def _resolve(self) -> Resolution:
        # Groups for two levels are made of the default group; a further module has a group of its own.
        two_level = self._group is None and dist.get_backend() == "nccl"
        unshared = memory_fault(self._module, *self._shape, self._group)
        return resolve_together(self._settings, self._module, *self._shape, two_level, unshared, self._group)

    def _start(self) -> Engine:
        self._frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]
        found = self._resolution
        rank_zero_info(
            f"AutoSync: plan {found.plan.fingerprint} ({found.plan.semantics}, "
            f"{found.plan.world_size} ranks, {len(found.plan.groups)} messages, "
            f"{found.workload.bytes / 1e6:.3g} MB): {found.reason}"
        )
        return Engine(
            variable_names(self._module),
            self.schedule,
            group=self._group,
            cluster=found.cluster,
            timeout=self._settings.timeout,
        )

    def _set_enabled(self, enabled: bool) -> bool:
        """Switch the engine; returns what it was."""
        if self._engine is None:
            return enabled
        before, self._engine.enabled = self._engine.enabled, enabled
        return before
