"""A replica that synchronizes gradients in every step, and therefore stays equal to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, StepOverlap
from lightning_autosync.engine.collectives import BufferBroadcast, broadcast_tensors, require_success
from lightning_autosync.engine.compressor_state import ParameterStates
from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.engine.exchanges.native import destroy_unused_groups
from lightning_autosync.engine.gradient_scale import GradientScale
from lightning_autosync.engine.loss_scaler import unscaling_later
from lightning_autosync.engine.resources import Resources
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.plan.schedule import first_parameters_first
from lightning_autosync.strategy.checkpoint import gather_state, own_state, warn_left_out
from lightning_autosync.strategy.job import RunningJob
from lightning_autosync.strategy.overlap import WaitLog, can_overlap, defer_steps_of, make_overlap, reading_forms
from lightning_autosync.strategy.passes import SynchronizedPasses
from lightning_autosync.strategy.replica_comparison import ParameterComparison, WeightComparison, follow_rank_zero
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.shares.batch_shares import BatchShares
from lightning_autosync.strategy.shares.losses import loss_weight_of
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.memory import buffer_fault
from lightning_autosync.strategy.tuning.proposals import JobLinks
from lightning_autosync.strategy.tuning.report import TuningReport
from lightning_autosync.strategy.tuning.step_meter import StepFigures
from lightning_autosync.workload import variable_names


class ExactReplica(SynchronizedPasses):
    """Synchronizes ``module`` by a plan with a schedule; most methods are collective.

    Args:
        module, settings, nodes, devices: as for `Replica.for_trainer`.
        group: process group of all ranks, which ends with the replica; None is the default group.
        watched: whether the strategy has a `FailureDetector` open.
        links: links of the job, if another replica has found them.

    Attributes:
        scale: multiplies this rank's gradients by the weight of its batch; None without batch shares.

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
        super().__init__()
        self._module = module
        self._watched = watched
        self._settings = settings
        self._group = group
        self._memory: ParameterStates = {}
        self._planned: dict[str, nn.Parameter] = {}
        overlaps = settings.overlap if can_overlap(module) else None
        self._tuning = JobTuning(module, replace(settings, overlap=overlaps), nodes, devices, group, links)
        self._tuning.resolve()
        self._waits = WaitLog()
        self.scale: GradientScale | None = None
        self._shares: BatchShares | None = None
        self._overlap: StepOverlap | None = None
        try:
            follow_rank_zero(module, settings.initial_buffers, group)
            self._buffers = BufferBroadcast(module, group) if settings.broadcast_buffers else None
            self._parameters = ParameterComparison(module, group)
            self._weights = WeightComparison(module, settings.check_replicas, group)
            self._overlap = make_overlap(module, settings)
            self._follow(self._start())
        except BaseException:
            if self._overlap is not None:
                self._overlap.close()  # its hook is on all modules of the process
            self._tuning.close()
            raise

    @classmethod
    def for_trainer(
        cls, module: nn.Module, settings: StrategySettings, nodes: int, devices: int, rank: int, job: RunningJob | None
    ) -> ExactReplica:
        return cls(module, settings, nodes, devices, watched=True)

    def share(self, shares: BatchShares) -> None:
        """Multiply this rank's gradients by the weight of each batch; call it before the first pass."""
        self._shares, self.scale = shares, GradientScale(lambda: shares.weight)
        if self._overlap is not None:
            shares.overlap(self._settings.timeout)
            self._overlap.waiting = shares.waiting
        shares.note_norms(self._module)
        shares.needs_batches = shares.needs_batches or loss_weight_of(self._module) is not None
        self._follow_gradients()

    def _follow_gradients(self) -> None:
        """Let `scale` follow all parameters, also frozen ones, which may train from a micro-batch without a plan on."""
        if self.scale is not None:
            every = variable_names(self._module, also={*self._module.parameters(), *self._planned.values()})
            self.scale.follow(own for _, own in every if own.is_floating_point() or own.is_complex())

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def plan(self) -> SyncPlan:
        return self._tuning.resolution.plan

    @property
    def schedule(self) -> Schedule:
        schedule = self._tuning.resolution.schedule
        assert schedule is not None
        return schedule

    @property
    def links(self) -> JobLinks | None:
        """The links of the job; None if they were not needed."""
        return self._tuning.links

    @property
    def may_measure_again(self) -> bool:
        """Whether it measures links again when they seem to have changed: that of a job's first module may."""
        return self._group is None

    def report(self) -> TuningReport:
        """What was chosen and tried so far, and why."""
        report, shares = self._tuning.report(), self._shares
        return report if shares is None else replace(report, batch_shares=tuple(shares.history))

    @property
    def tunes(self) -> bool:
        return self._tuning.trying

    def measure_steps(self) -> bool:
        # On an accelerator, the host only issues the work, so its clock does not tell when a pass or a message ended.
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._module.parameters())
        if self._engine is None or not on_cpu:
            return False
        self._tuning.measure_steps(self._engine)
        return True

    def step_figures(self) -> StepFigures | None:
        figures, shares = self._tuning.step_figures(), self._shares
        if figures is None or shares is None:
            return figures
        return replace(figures, batch_share=shares.shares[shares.rank] / sum(shares.shares))

    def join_others(self) -> None:
        """Note that the job has other modules too; all ranks call it at the same place of their programs."""
        self._parameters.alone = self._parameters.active = False

    def settle(self, compiled: bool = False) -> None:
        if self._overlap is not None:
            self._overlap.settle()
            if compiled:
                self._waits.tell_compiled()

    @property
    def clips_norms(self) -> Literal["never", "may", "must"]:
        return "never" if self._overlap is None else "may"

    def clip_by_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        if self._overlap is None:
            return None
        return self._overlap.clip_by_norm(parameters, max_norm, error_if_nonfinite)

    def unscaling(self, scaler: GradScaler | None) -> AbstractContextManager[None]:
        return nullcontext() if self._overlap is None else unscaling_later(scaler, self._overlap)

    def start_training(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        if self._overlap is not None:
            defer_steps_of(optimizers, self._settings)

    def before_forward(self, synchronizes: bool) -> None:
        """Call before each forward pass; ``synchronizes`` if a synchronized backward pass may follow.

        Raises:
            ExchangeError: an error ended the last backward pass (see `Engine.refuse_unended`), or synchronization.
        """
        if torch.is_grad_enabled():
            self._refuse_passes()
        if self._engine is not None and torch.is_grad_enabled():
            self._engine.refuse_unended()
        if self._buffers is not None and self._engine is not None:
            if self._overlap is not None and self._buffers.due:  # a look at all modules
                self.notice_change()
            with nullcontext() if self._shares is None else self._shares.waiting():
                self._buffers.before_forward(synchronizes)

    def collective(self, what: str, each_step: bool = False) -> AbstractContextManager[None]:
        self.notice_change()
        return nullcontext()

    def notice_change(self) -> None:
        """Let this rank compare parameters before a collective call, if other ranks do so already."""
        if self._overlap is not None:
            self._overlap.notice_change()

    def before_synchronization(self) -> None:
        """Check before each backward pass of training that all ranks still train the same parameters.

        After a change that `note_changes` found, ranks compare digests before each pass until there was no change for a
        while. This serves scripts that freeze networks in turn. It is collective then, so all ranks call this equally
        often: once per pass.

        Raises:
            PlanError: (on every rank) parameters changed on some ranks only, or the user's plan does not have them.
        """
        if not self._parameters.active or not self.enabled:
            self.note_changes()
        elif self._parameters.run():
            self._accept_change()

    def note_changes(self) -> None:
        """Let the next synchronized pass tell the other ranks if this rank's parameters changed.

        Passes without a change cost nothing. Not collective: ranks may make different numbers of forward passes.
        """
        engine = self._engine
        if engine is None or not (engine.enabled or self.scale is not None):
            return
        changed = self._parameters.changed()
        renews = changed and not self._covers()
        if renews:  # also before a micro-batch that only accumulates, whose gradients count by its weight too
            self._follow_gradients()
        if not engine.enabled:
            return
        engine.changed = changed
        if renews:
            engine.renew_hooks(parameter for _, parameter in variable_names(self._module))

    def end_training(self) -> None:
        """Check at the end of training that weights are equal on all ranks; collective.

        Raises:
            ExchangeError: (on every rank) weights differ.
        """
        self.settle()
        if self._engine is not None:
            self._weights.run()

    def follow_scaler(self, scaler: GradScaler | None) -> None:
        """Tell the engine the loss scale of the next backward pass; ``scaler`` is None if the loss is not scaled."""
        engine = self._engine
        # Reading the scale would block on an accelerator, so it is read only if error feedback needs it.
        if engine is not None and engine.has_residuals:
            scales = scaler is not None and scaler.is_enabled()
            engine.loss_scale = scaler.get_scale() if scaler is not None and scales else None

    @contextmanager
    def backward(self, scaler: GradScaler | None = None) -> Iterator[None]:
        """The context of one backward pass; after it, gradients are means over ranks, or become so when they are read.

        Args:
            scaler: the scaler of the loss; None if the loss is not scaled.

        Raises:
            ExchangeError: (on every rank) weights differ between ranks.
            PlanError: see `before_synchronization`.
        """
        self._refuse_passes()
        self.settle()  # the optimizer's last step, before gradients change
        self.before_synchronization()
        self.follow_scaler(scaler)
        engine = self._engine
        if engine is None:
            yield
            return
        self._choose_wait(engine)
        with self._synchronizing(engine):
            yield

    def gather_state(self) -> dict[str, Any] | None:
        """The state of compressors on all ranks, for a checkpoint; see `checkpoint.gather_state`."""
        state = {} if self._engine is None else self._engine.state_dict()
        if self._engine is None or self.tunes:  # in a trial, another plan than the present one may be in use
            state = self._memory | state
        return gather_state(state, self._group)

    def restore_state(self, entry: dict[str, Any] | None, steps: int = 0) -> None:
        """Resume from a checkpoint of this plan or another; a warning names variables whose state does not fit."""
        if self._engine is not None and entry is not None:
            state = own_state(entry, self._group)
            left_out = self._engine.load_state_dict(state)
            if self.tunes:  # the plan of the checkpoint may be tried again
                self._memory |= {name: state[name] for name in left_out}
            else:
                warn_left_out(left_out, "the checkpoint was made under another plan")

    def close(self) -> None:
        """Stop synchronizing; the state of compressors is kept for `gather_state`."""
        self._close(together=False)

    def close_together(self) -> None:
        """Like `close`, with the process groups of accelerators, too; all ranks call it at the same place."""
        self._close(together=True)

    def _close(self, together: bool) -> None:
        self._guards.remove()
        with ExitStack() as closing:  # in reverse order, whatever fails
            closing.callback(self._destroy_groups, together)
            closing.callback(self._close_engine)
            closing.callback(self._end_overlap)

    def _end_overlap(self) -> None:
        try:
            if self._overlap is not None:
                self._overlap.close()
        finally:
            self._overlap = None  # the engine to which the end of a trial returns does not overlap any more

    def _destroy_groups(self, together: bool) -> None:
        """Destroy the process groups that nothing uses any more; later calls of `gather_state` use the default one.

        Those of NCCL stay unless all ranks are here ``together``: a rank that failed would wait for the others.
        """
        if not together and dist.is_initialized() and dist.get_backend(self._group) == "nccl":
            return
        destroy_unused_groups()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _close_engine(self) -> None:
        if self._engine is None:
            return
        try:
            self._tuning.close()
        finally:
            engine, self._engine = self._engine, None
            self._memory = engine.state_dict()
            engine.close()
            if self.scale is not None:
                self.scale.close()

    def _end_pass(self) -> None:
        self._weights.count()
        if self._shares is not None:
            self._shares.end_pass(steady=not self.tunes)
        if self._tuning.after_pass():
            self._plan_anew("links")

    def _end_backward(self) -> None:
        if self._shares is not None and self._engine is not None:
            overlaps = self._engine.waits == "parameters" and not self._engine.changed
            usual = overlaps or self._overlap is None or self._engine.schedule.waits
            self._shares.end_backward(overlaps, usual, steady=not self.tunes)

    def _begin_pass(self) -> None:
        """Compare parameters at the first gradient of a pass, where no `backward` did so before the pass.

        Ranks make equally many backward passes, unlike forward passes. A change that needs no other plan is accepted
        now, so that the pass exchanges the right messages at once; `_follow_change` handles others after the pass.
        """
        assert self._engine is not None
        self._begin_by_hand()
        self._choose_wait(self._engine)
        if not self._parameters.active:
            return
        self._engine.changed = self._parameters.run()
        if self._engine.changed and self._covers():
            self._accept_change()

    def _follow_change(self) -> None:
        """Handle a pass before which some rank's parameters changed.

        The change must be the same on all ranks. The gradients of this pass are then synchronized again, for all
        parameters that now train.
        """
        if self._overlap is not None:
            self._overlap.release()
        self._parameters.begin()
        self._accept_change()
        assert self._engine is not None
        self._engine.synchronize()

    def _accept_change(self) -> None:
        """Accept a change that all ranks made; make a new plan if this one lacks a parameter that now trains.

        Ranks may have drawn other values for new parameters. All take rank 0's, as all parameters before training.
        """
        assert self._engine is not None
        new = [name for name in self._current() if name not in self._planned]
        if new and self._settings.fixed:  # not accepted, so that each later pass raises too
            raise PlanError(
                f"{self._settings.source}: groups: parameter '{new[0]}' was unfrozen or added, but is in no group "
                f"({len(new)} such parameters); make the plan for the changed model, or do not give a plan"
            )
        with self._opening_anew():
            self._engine.changed = False
            broadcast_tensors([parameter.data for parameter in self._parameters.accept()], self._group)
        if self._covers():
            self._weights.choose(self._planned)
        else:
            self._plan_anew("parameters")

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

    def _plan_anew(self, changed: str) -> None:
        """Make a plan for the current parameters and links, and an engine for it, because some have ``changed``.

        The state of compressors is kept, except for variables with another compressor in the new plan.
        """
        assert self._engine is not None
        enabled, expects, scale = self._engine.enabled, self._engine.expects, self._engine.loss_scale
        with self._opening_anew():
            self._close_engine()
            self._tuning.resolve(also=set(self._planned.values()))
            self._follow(self._start())
        assert self._engine is not None
        self._engine.enabled, self._engine.expects, self._engine.loss_scale = enabled, expects, scale
        warn_left_out(self._engine.load_state_dict(self._memory), f"{changed} changed, so a new plan was made")

    def _start(self) -> Engine:
        self._planned = self._current()
        self._dtypes = {name: parameter.dtype for name, parameter in self._planned.items()}
        self._weights.choose(self._planned)
        self._follow_gradients()
        return self._tuning.start(self._open, self._reserve, self._use)

    def _open(
        self, schedule: Schedule, connect_timeout: float = CONNECT_TIMEOUT, resources: Resources | None = None
    ) -> Engine:
        engine = Engine(
            list(self._planned.items()),
            self._ordered(schedule),
            waits="backward" if self._overlap is None else "parameters",
            static_graph=self._settings.static_graph,
            resources=resources,
            connect_timeout=connect_timeout,
            **self._shared_options,
        )
        engine.on_begin, engine.on_change, engine.on_pass = self._begin_pass, self._follow_change, self._end_pass
        engine.on_backward = self._end_backward
        engine.expects = False  # as DDP's reducer before the first forward pass
        return engine

    def _reserve(
        self,
        schedule: Schedule,
        cluster: ClusterSpec,
        connect_timeout: float,
        control: dist.ProcessGroup | None,
        rest: Callable[[], None],
    ) -> Resources:
        """Open the resources of an engine on any thread, while another engine works; collective over ``control``.

        Raises:
            OpeningError: (on every rank) see `Engine`; or a rank has no memory for a further plan beside the job.
        """
        rank = dist.get_rank(control)
        sharing = len(cluster.ranks_of(cluster.rank_nodes[rank]))
        require_success(buffer_fault(schedule, rank, sharing), control)
        options = {"connect_timeout": connect_timeout, "control": control, "rest": rest, **self._shared_options}
        with reading_forms():
            return Resources(dict(self._planned), self._ordered(schedule), **{**options, "cluster": cluster})

    @property
    def _shared_options(self) -> dict[str, Any]:
        """Options that engines and their resources have in common."""
        return {
            "group": self._group,
            "cluster": self._tuning.resolution.cluster,
            "timeout": self._settings.timeout,
            "gradient_as_bucket_view": self._settings.gradient_as_bucket_view,
            "watched": self._watched,
            "notes": self._tuning.notes,
        }

    def _ordered(self, schedule: Schedule) -> Schedule:
        overlaps = self._overlap is not None and not schedule.waits
        return first_parameters_first(schedule, list(self._planned)) if overlaps else schedule

    def _use(self, engine: Engine) -> None:
        """Let another engine synchronize the following passes.

        It takes the state of compressors over, except for variables that it compresses in another way or not at all.
        Their state is kept for engines that do.
        """
        present = self._engine
        if present is None or present is engine:
            return
        engine.enabled, engine.expects, engine.loss_scale = present.enabled, present.expects, present.loss_scale
        state = self._memory | present.state_dict()
        self._memory = {name: state[name] for name in engine.load_state_dict(state)}
        present.enabled = False
        self._follow(engine)

    def _follow(self, engine: Engine) -> None:
        self._engine = engine
        if self._overlap is not None:
            self._overlap.follow(engine)

    def _choose_wait(self, engine: Engine) -> None:
        """Choose when the coming pass waits, alike on all ranks: at its end if collective calls may follow it."""
        if self._overlap is None:
            return
        self._overlap.begin_pass()
        follows = self._shares is not None and self._shares.waits_at_end
        reasons = self._parameters.active, self._tuning.waits_at_end, self._weights.is_due, follows
        engine.waits = "backward" if engine.schedule.waits or any(reasons) else "parameters"
        self._waits.tell(*reasons)
