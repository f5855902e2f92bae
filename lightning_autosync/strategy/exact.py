"""A replica that synchronizes gradients in every step, and therefore stays equal to the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_autosync.documents import counted
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import BufferBroadcast, broadcast_tensors, gather_json, group_device
from lightning_autosync.engine.compressor_state import ParameterStates
from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.engine.replicas import ParameterTracker, ReplicaCheck, difference, warn_of_shortened
from lightning_autosync.errors import OpeningError, PlanError
from lightning_autosync.plan import Schedule, SyncPlan, compile_plan
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.checkpoint import gather_state, own_state, warn_left_out
from lightning_autosync.strategy.job import RunningJob
from lightning_autosync.strategy.resolution import Resolution, fall_back, memory_fault, resolve_together
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning.drift import DriftWatch
from lightning_autosync.strategy.tuning.live import LiveTuner
from lightning_autosync.strategy.tuning.preparation import Preparation, prepare, remember
from lightning_autosync.strategy.tuning.proposals import JobLinks, changed_links, find_links
from lightning_autosync.strategy.tuning.report import TrialReport, TuningReport
from lightning_autosync.workload import shared_buffers, shared_parameters, shortened_rows, variable_names

_TRIAL_CONNECT_TIMEOUT = 10.0
"""Seconds in which ranks must connect for a plan that is tried: training waits for that."""
_CALM = 100
"""Passes without a change after which ranks no longer compare their parameters before each pass."""


class ExactReplica(Replica):
    """Synchronizes ``module`` by a plan with a schedule; most methods are collective.

    Args:
        module: the module, on its device and in its dtype.
        settings: settings of the strategy.
        nodes: number of nodes in the job.
        devices: number of ranks per node.
        group: process group of all ranks; None is the default group.
        watched: whether the strategy has a `FailureDetector` open.
        links: links of the job, if another replica has found them.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        ExchangeError: ranks cannot connect to each other.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: StrategySettings,
        nodes: int,
        devices: int,
        group: dist.ProcessGroup | None = None,
        watched: bool = False,
        links: JobLinks | None = None,
    ) -> None:
        self._module = module
        self._watched = watched
        self._settings = settings
        self._shape = (nodes, devices)
        self._group = group
        self._memory: ParameterStates = {}
        self._planned: dict[str, nn.Parameter] = {}
        self._compared: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self._links = links
        self._preparation: Preparation | None = None
        self._tuner: LiveTuner | None = None
        self._changes = 0
        self._schedules: list[Schedule] = []
        self._trials: list[TrialReport] = []
        self._tuned = "off"
        self._resolution = self._resolve()
        broadcast_tensors(_initial_state(module, settings.initial_buffers), group)
        self._buffers = BufferBroadcast(module, group) if settings.broadcast_buffers else None
        self._watch = ParameterTracker(module)
        self._agreed = self._watch.digest()
        self._comparing, self._calm = False, 0
        self._check = ReplicaCheck(settings.check_replicas, group) if settings.check_replicas else None
        self._engine: Engine | None = None
        self._engine = self._start()

    @classmethod
    def for_trainer(
        cls, module: nn.Module, settings: StrategySettings, nodes: int, devices: int, rank: int, job: RunningJob | None
    ) -> ExactReplica:
        return cls(module, settings, nodes, devices, watched=True)

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

    @property
    def links(self) -> JobLinks | None:
        """The links of the job; None if they were not needed."""
        return self._links

    def report(self) -> TuningReport:
        """What was chosen and tried so far, and why."""
        tuner, reason = self._tuner, self._resolution.reason
        plan = self.plan if tuner is None else tuner.present.plan
        trials = self._trials if tuner is None else [*self._trials, *tuner.trials]
        if any(each.plan == plan.fingerprint and each.accepted for each in trials):
            reason = f"the fastest in trials; the job began with {reason}"
        return TuningReport(
            plan=plan.fingerprint,
            reason=reason,
            links="" if self._links is None else self._links.describe(),
            candidates=[(each.name, each.predicted) for each in self._resolution.alternatives],
            trials=trials,
            tuning=self._tuned if tuner is None else tuner.state,
        )

    @property
    def enabled(self) -> bool:
        """Whether backward passes synchronize gradients; otherwise they only accumulate them."""
        return self._engine is not None and self._engine.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if self._engine is not None:
            self._engine.enabled = enabled

    def before_forward(self, synchronizes: bool) -> None:
        """Call before each forward pass; ``synchronizes`` if a synchronized backward pass may follow."""
        if self._buffers is not None and self._engine is not None:
            self._buffers.before_forward(synchronizes)

    def before_synchronization(self) -> None:
        """Check before each backward pass of training that all ranks still train the same parameters.

        After a change that `note_changes` found, ranks compare digests before each pass until there was no change for a
        while. This serves scripts that freeze networks in turn. It is collective then, so all ranks call this equally
        often: once per pass.

        Raises:
            PlanError: (on every rank) parameters changed on some ranks only, or the user's plan does not have them.
        """
        if not self._comparing or not self.enabled:
            self.note_changes()
        elif self._compare():
            self._accept_change()

    def note_changes(self) -> None:
        """Let the next synchronized pass tell the other ranks if this rank's parameters changed.

        Passes without a change cost nothing. Not collective: ranks may make different numbers of forward passes.
        """
        engine = self._engine
        if engine is None or not engine.enabled:
            return
        engine.changed = self._watch.changed()
        if engine.changed and not self._covers():
            engine.renew_hooks(parameter for _, parameter in variable_names(self._module))

    def end_training(self) -> None:
        """Check at the end of training that weights are equal on all ranks; collective.

        Raises:
            ExchangeError: (on every rank) weights differ.
        """
        if self._check is not None and self._engine is not None:
            self._check.run({**self._compared, **self._frozen})

    def follow_scaler(self, scaler: GradScaler | None) -> None:
        """Tell the engine the loss scale of the next backward pass; ``scaler`` is None if the loss is not scaled."""
        engine = self._engine
        # Reading the scale would block on an accelerator, so it is read only if error feedback needs it.
        if engine is not None and engine.has_residuals:
            scales = scaler is not None and scaler.is_enabled()
            engine.loss_scale = scaler.get_scale() if scaler is not None and scales else None

    @contextmanager
    def backward(self, scaler: GradScaler | None = None) -> Iterator[None]:
        """The context of one backward pass; after it, gradients are means over ranks.

        Args:
            scaler: the scaler of the loss; None if the loss is not scaled.

        Raises:
            ExchangeError: (on every rank) weights differ between ranks.
            PlanError: see `before_synchronization`.
        """
        self.before_synchronization()
        self.follow_scaler(scaler)
        engine = self._engine
        if engine is None:
            yield
            return
        engine.deferred, enabled = True, engine.enabled
        try:
            yield
            engine.finish()
        except BaseException as error:
            if enabled:  # otherwise no other rank takes part
                (self._engine or engine).interrupt(error)
            raise
        finally:
            engine.deferred = False

    def gather_state(self) -> dict[str, Any] | None:
        """The state of compressors on all ranks, for a checkpoint; see `checkpoint.gather_state`."""
        state = self._memory if self._engine is None else self._engine.state_dict()
        return gather_state(state, self._group)

    def restore_state(self, entry: dict[str, Any] | None, steps: int = 0) -> None:
        """Resume from a checkpoint of this plan or another; a warning names variables whose state does not fit."""
        if self._engine is not None and entry is not None:
            state = own_state(entry, self._group)
            warn_left_out(self._engine.load_state_dict(state), "the checkpoint was made under another plan")

    def close(self) -> None:
        """Stop synchronizing; the state of compressors is kept for `gather_state`."""
        if self._engine is None:
            return
        if self._tuner is not None:
            self._trials += self._tuner.trials
            self._tuned = self._tuner.state
            self._tuner.close()
            self._tuner = None
        self._memory = self._engine.state_dict()
        self._engine.close()
        self._engine = None

    def _end_pass(self) -> None:
        # Weights are compared after a number of backward passes, because all ranks make equally many of them, unlike
        # forward passes.
        if self._check is not None:
            self._check.count(self._compared, self._frozen)
        if self._tuner is None:
            return
        ended = self._tuner.ended
        if reason := self._tuner.after_pass():
            self._measure_again(reason)
        elif self._tuner.ended and not ended and dist.get_rank(self._group) == 0:
            assert self._preparation is not None
            assert self._settings.tuning is not None
            remember(self._preparation, self._tuner, self._settings.tuning.cache)

    def _begin_pass(self) -> None:
        """Compare parameters at the first gradient of a pass, where no `backward` did so before the pass.

        Ranks make equally many backward passes, unlike forward passes. A change that needs no other plan is accepted
        now, so that the pass exchanges the right messages at once; `_follow_change` handles others after the pass.
        """
        if not self._comparing:
            return
        assert self._engine is not None
        self._engine.changed = self._compare()
        if self._engine.changed and self._covers():
            self._accept_change()

    def _compare(self) -> bool:
        """Raise if parameters differ between ranks; returns whether all ranks made a change."""
        own = self._watch.digest()
        # The maximum of the negated digests is the negated minimum, so one all-reduce compares them.
        extremes = torch.tensor([own, -own], dtype=torch.int64, device=group_device(self._group))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest != smallest:
            self._refuse_differences()
        self._calm = self._calm + 1 if own == self._agreed else 0
        self._comparing = self._calm < _CALM
        return own != self._agreed

    def _follow_change(self) -> None:
        """Handle a pass before which some rank's parameters changed.

        The change must be the same on all ranks. The gradients of this pass are then synchronized again, for all
        parameters that now train.
        """
        self._refuse_differences()
        self._comparing, self._calm = True, 0
        self._accept_change()
        assert self._engine is not None
        self._engine.synchronize()

    def _refuse_differences(self) -> None:
        if found := difference(gather_json(self._watch.facts(), self._group)):
            raise PlanError(
                f"model: {found}. Replicas would diverge: make the same change at the same step on all ranks"
            )

    def _accept_change(self) -> None:
        """Accept a change that all ranks made; make a new plan if this one lacks a parameter that now trains."""
        assert self._engine is not None
        self._engine.changed = False
        self._watch.accept()
        self._agreed = self._watch.digest()
        if self._covers():
            self._choose_compared()
        else:
            self._plan_anew()

    def _covers(self) -> bool:
        """Whether the plan has all parameters that train now, in their present dtypes."""
        current = self._current()
        return current.keys() == self._planned.keys() and all(
            self._planned[name] is parameter and self._dtypes[name] == parameter.dtype
            for name, parameter in current.items()
        )

    def _current(self) -> dict[str, nn.Parameter]:
        """The parameters that train now or are in the plan, so that networks that train in turn share a plan."""
        return dict(variable_names(self._module, also=set(self._planned.values())))

    def _plan_anew(self) -> None:
        """Make a plan for the current parameters, and an engine for it.

        The state of compressors is kept, except for variables with another compressor in the new plan.
        """
        new = [name for name in self._current() if name not in self._planned]
        if new and self._settings.fixed:
            raise PlanError(
                f"{self._settings.source}: groups: parameter '{new[0]}' was unfrozen or added, but is in no group "
                f"({len(new)} such parameters); make the plan for the changed model, or do not give a plan"
            )
        assert self._engine is not None
        enabled, scale = self._engine.enabled, self._engine.loss_scale
        self.close()
        self._resolution = self._resolve()
        self._engine = self._start()
        self._engine.enabled, self._engine.loss_scale = enabled, scale
        warn_left_out(self._engine.load_state_dict(self._memory), "parameters changed, so a new plan was made")

    def _prepare(self) -> Preparation | None:
        """Find links and plans, if the user gave no plan and links matter; collective."""
        settings, tuning = self._settings, self._settings.tuning
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._module.parameters())
        nodes = self._shape[0] if settings.cluster is None else len(settings.cluster.nodes)
        if tuning is None or settings.plan is not None or not on_cpu or nodes == 1:
            return None
        if settings.cluster is None and not tuning.probe:
            return None
        also = set(self._planned.values())
        found = prepare(settings, self._module, *self._shape, self._group, also, self._links)
        if found.on_one_host:
            self._shape = 1, found.links.cluster.world_size  # the nodes of this job are one machine
            return None
        self._links = found.links
        return found

    def _measure_again(self, reason: str) -> None:
        """Measure the links again; if they have changed, plan for them."""
        tuning = self._settings.tuning
        assert tuning is not None
        assert self._links is not None
        found = find_links(None, *self._shape, tuning.probe, self._settings.timeout)
        changes = [] if found.fault else changed_links(self._links.cluster, found.cluster)
        rank_zero_info(
            f"AutoSync: links were measured again, because {reason}. "
            + (" ".join(changes) or found.fault or "They have not changed.")
        )
        if changes:
            self._links, self._changes = found, self._changes + 1
            self._plan_anew()

    def _resolve(self) -> Resolution:
        self._preparation = found = self._prepare()
        settings = self._settings if found is None else replace(self._settings, cluster=found.links.cluster)
        resolution = resolve_together(
            settings,
            self._module,
            *self._shape,
            self._group,
            # Groups for two levels are subsets of the default group, but a second module in Fabric has its own group.
            two_level_collectives=self._group is None and dist.get_backend() == "nccl",
            unshared=memory_fault(self._module, *self._shape, self._group),
            also=set(self._planned.values()),
            proposals=None if found is None else found.proposals,
        )
        if found is None or not found.links.fault:
            return resolution
        return replace(resolution, reason=f"{resolution.reason}: {found.links.fault}")

    def _choose_compared(self) -> None:
        """Choose the parameters whose weights are compared: those in the plan, and, more rarely, the frozen ones."""
        found = dict(variable_names(self._module, also=set(self._module.parameters())))
        shortened = shortened_rows(self._module)
        if not self._compared:
            warn_of_shortened(name for name, parameter in found.items() if parameter in shortened)
        kept = {name: parameter for name, parameter in found.items() if parameter not in shortened}
        self._compared = {name: parameter for name, parameter in kept.items() if name in self._planned}
        self._frozen = {name: parameter for name, parameter in kept.items() if name not in self._planned}

    def _start(self) -> Engine:
        self._planned = self._current()
        self._dtypes = {name: parameter.dtype for name, parameter in self._planned.items()}
        self._choose_compared()
        try:
            engine = self._open(self.schedule)
        except OpeningError as error:  # on every rank
            self._resolution = fall_back(self._resolution, error)
            engine = self._open(self.schedule)
        found = self._resolution
        rank_zero_info(
            f"AutoSync: plan {found.plan.fingerprint} ({found.plan.semantics}, "
            f"{counted(found.plan.world_size, 'rank')}, {counted(len(found.plan.groups), 'message')}, "
            f"{found.workload.bytes / 1e6:.3g} MB): {found.reason}"
        )
        if found.alternatives and self._group is None:
            assert self._settings.tuning is not None
            assert self._preparation is not None
            # Compiled now, so that no step has to wait for it.
            self._schedules = [compile_plan(each.plan, found.workload, found.cluster) for each in found.alternatives]
            self._tuner = LiveTuner(
                found.alternatives,
                engine,
                self._open_alternative,
                self._use,
                self._settings.tuning,
                self._group,
                DriftWatch(self._changes, self._preparation.expected),
            )
        return engine

    def _open(self, schedule: Schedule, connect_timeout: float = CONNECT_TIMEOUT) -> Engine:
        engine = Engine(
            list(self._planned.items()),
            schedule,
            group=self._group,
            cluster=self._resolution.cluster,
            timeout=self._settings.timeout,
            gradient_as_bucket_view=self._settings.gradient_as_bucket_view,
            static_graph=self._settings.static_graph,
            watched=self._watched,
            connect_timeout=connect_timeout,
        )
        engine.on_begin, engine.on_change, engine.on_pass = self._begin_pass, self._follow_change, self._end_pass
        return engine

    def _open_alternative(self, index: int) -> Engine:
        """An engine for one of the plans that may be tried; collective."""
        return self._open(self._schedules[index], _TRIAL_CONNECT_TIMEOUT)

    def _use(self, index: int, engine: Engine) -> None:
        """Let the engine of one of the plans synchronize the following passes."""
        present = self._engine
        if present is None or present is engine:
            return
        engine.enabled, engine.loss_scale = present.enabled, present.loss_scale
        present.enabled = False
        self._engine = engine
        self._resolution = replace(
            self._resolution, plan=self._resolution.alternatives[index].plan, schedule=engine.schedule
        )


def _initial_state(module: nn.Module, buffers: bool) -> list[Tensor]:
    """Tensors that all ranks take from rank 0 before training."""
    found = [parameter.data for _, parameter in shared_parameters(module)]
    return found + [buffer.data for _, buffer in shared_buffers(module)] if buffers else found
