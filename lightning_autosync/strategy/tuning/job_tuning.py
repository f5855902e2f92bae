"""`JobTuning`: chooses the plan of a replica, tries others while it trains, and tells what came of it."""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Container
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import bytes_text, counted
from lightning_autosync.engine import Engine
from lightning_autosync.engine.collectives import OWN_GROUP, broadcast_json, gather_json, new_group, separate_group
from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.engine.exchanges.native import destroy_unused_groups
from lightning_autosync.engine.resources import Resources
from lightning_autosync.engine.tracing import Recorder
from lightning_autosync.errors import OpeningError
from lightning_autosync.measure.probe.hosts import shared_cores
from lightning_autosync.plan import Schedule, compile_plan
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.agreement import agree
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.overlap import why_no_overlap
from lightning_autosync.strategy.resolution import (
    Resolution,
    fall_back,
    memory_fault,
    resolve_together,
    with_connected_interfaces,
)
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning.accelerators import choose_measured
from lightning_autosync.strategy.tuning.drift import DriftWatch
from lightning_autosync.strategy.tuning.live import LiveTuner
from lightning_autosync.strategy.tuning.opening import BackgroundOpening
from lightning_autosync.strategy.tuning.pass_times import NOTES, PassTimes
from lightning_autosync.strategy.tuning.preparation import Preparation, forget, prepare, remember
from lightning_autosync.strategy.tuning.prices import PlanPrices
from lightning_autosync.strategy.tuning.proposals import JobLinks, compare_links, find_links
from lightning_autosync.strategy.tuning.recovery import FormerPlan
from lightning_autosync.strategy.tuning.report import MeasuredSteps, TrialReport, TuningReport
from lightning_autosync.strategy.tuning.step_meter import StepFigures, StepMeter
from lightning_autosync.workload import variable_names

TRIAL_CONNECT_TIMEOUT = 10.0
"""Seconds in which ranks must connect for a plan that is tried, or for the first one after links have changed."""

_NO_OTHER = "no other plan is tried"
_ONE_MACHINE = "all ranks run on one machine"
_FIRST_ONLY = "trials are for the first module only"
_ON_DEVICES = "on accelerators plans are measured before the first step"
_DETERMINISTIC = (
    "torch's deterministic algorithms are on, and with plans that follow from measured times, two runs could differ in "
    "the last bits"
)
_PYTHON = "version of Python (all ranks need the same one, or tuning='off' or a plan)"


class JobTuning:
    """The plan of one replica, from the choice before the first step to the trials during training.

    Without tuning, the plan follows from the settings alone, and no other is tried.

    Args:
        module, settings, nodes, devices, group, links: as for `ExactReplica`.

    Attributes:
        links: the links of the job; None if they were not needed.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: StrategySettings,
        nodes: int,
        devices: int,
        group: dist.ProcessGroup | None,
        links: JobLinks | None,
    ) -> None:
        self._module = module
        self._settings = settings
        self._shape = (nodes, devices)
        self._group = group
        self.links = links
        self._resolution: Resolution | None = None
        self._preparation: Preparation | None = None
        self._tuner: LiveTuner | None = None
        self._changes = self._plan_changes = 0
        self._fell_back = False
        self._former: FormerPlan | None = None
        self._control: dist.ProcessGroup | None = None
        self._meter: StepMeter | None = None
        self._recorder: Recorder | None = None
        self._schedules: list[Schedule] = []
        self._trials: list[TrialReport] = []
        self._checks: list[str] = []
        self._ended = _NO_OTHER

    @property
    def resolution(self) -> Resolution:
        """What the job uses now: the workload, the cluster, the plan and its schedule."""
        assert self._resolution is not None
        return self._resolution

    @property
    def notes(self) -> int:
        """Numbers of each rank that travel with the gradients of a job that tunes itself."""
        return NOTES if self._tries and self._settings.overlap is None else 0

    @property
    def _tries(self) -> bool:
        """Whether plans are tried on training steps."""
        return self._may_try and bool(self.resolution.alternatives)

    @property
    def _may_try(self) -> bool:
        """Whether plans are tried if there are any others."""
        return self._group is None and self._device == "cpu"

    @property
    def _device(self) -> str:
        """The type of the devices that compute, ``cpu`` only if all parameters are there."""
        others = {parameter.device.type for parameter in self._module.parameters()} - {"cpu"}
        return min(others, default="cpu")

    @property
    def trying(self) -> bool:
        """Whether other plans are tried, or may yet be, or an earlier one shows whether links have recovered."""
        return self._tuner is not None and not self._tuner.settled

    @property
    def waits_at_end(self) -> bool:
        """Whether the coming pass has to wait at its end, although it could overlap."""
        return self._tuner is not None and self._tuner.waits_at_end

    def resolve(self, also: Container[nn.Parameter] = ()) -> None:
        """Choose the plan, and say on rank 0 which one and why; collective.

        Args:
            also: frozen parameters that the plan also covers, because they train at other times.

        Raises:
            DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other.
        """
        try:
            self._resolve(also)
        except BaseException:
            self._close_control()
            raise

    def _resolve(self, also: Container[nn.Parameter]) -> None:
        self._settings = with_connected_interfaces(self._settings, self._group)
        self._preparation = found = self._prepare(also)
        settings = self._settings if found is None else replace(self._settings, cluster=found.links.cluster)
        resolution = resolve_together(
            settings,
            self._module,
            *self._shape,
            self._group,
            two_level_collectives=self._two_level_collectives,
            unshared=memory_fault(self._module, *self._shape, self._group),
            also=also,
            proposals=None if found is None else found.proposals,
            cores=shared_cores() if found is None and self._group is None else None,
        )
        if found is not None and found.links.fault:
            resolution = replace(resolution, reason=f"{resolution.reason}: {found.links.fault}")
        if self._resolution is not None and self._resolution.plan != resolution.plan:
            self._plan_changes += 1
        self._resolution = resolution
        rank_zero_info(
            f"AutoSync: plan {resolution.plan.fingerprint} ({resolution.plan.semantics}, "
            f"{counted(resolution.plan.world_size, 'rank')}, {counted(len(resolution.plan.groups), 'message')}, "
            f"{bytes_text(resolution.workload.bytes)}): {resolution.reason}"
        )
        self._tell_what_has_no_effect()

    def _tell_what_has_no_effect(self) -> None:
        """Say on rank 0 which settings change nothing under a plan beside which no other is searched."""
        settings, found = self._settings, self.resolution
        if found.alternatives:
            return
        if settings.semantics != "exact" and settings.plan is None:
            fault = "" if self._preparation is None else self._preparation.links.fault
            relaxed = "no relaxed plan is given, and " if settings.semantics == "relaxed" else ""
            rank_zero_info(
                f"AutoSync: semantics='{settings.semantics}' has no effect, because {relaxed}the job does not search "
                f"for plans that compress gradients: {fault or self._ended.removeprefix(f'{_NO_OTHER}: ')}"
            )
        if settings.overlap is not None and (reason := why_no_overlap(found.plan, found.schedule)):
            rank_zero_info(f"AutoSync: overlap='{settings.overlap}' has no effect, because {reason}")

    def start(
        self, open_engine: Callable[..., Engine], reserve: Callable[..., Resources], use: Callable[[Engine], None]
    ) -> Engine:
        """Open the engine of the chosen plan, and begin to try other plans, if there are any; collective.

        Args:
            open_engine: opens an engine for a schedule; collective. Its second argument, which may be left out,
                limits the seconds in which ranks connect. With its third one, resources, only an engine is made.
            reserve: opens the resources of an engine, on another thread, for a schedule and the links for which it is
                paced, with the seconds in which ranks connect, with a process group that nothing else uses, and with
                what is called between pieces of the work; collective.
            use: lets an engine synchronize the following passes.

        Returns:
            The engine; that of DDP's plan if ranks cannot open the chosen one, and the user did not give it.

        Raises:
            ExchangeError: ranks cannot connect to each other.
        """
        try:
            engine = self._open_first(open_engine)
        except BaseException:
            self._close_control()
            raise
        destroy_unused_groups()  # of plans that were only measured
        if not self._tries:
            self._close_control()
            if self.resolution.alternatives:
                self._ended = f"{_NO_OTHER}: {_ON_DEVICES if self._device != 'cpu' else _FIRST_ONLY}"
            self._record(engine)
            return engine
        try:
            self._begin_trials(engine, open_engine, reserve, use)
        except BaseException:
            try:
                engine.close()
            finally:
                self.close()
            raise
        return engine

    def _begin_trials(
        self,
        engine: Engine,
        open_engine: Callable[..., Engine],
        reserve: Callable[..., Resources],
        use: Callable[[Engine], None],
    ) -> None:
        found = self.resolution
        assert self._settings.tuning is not None
        assert self._preparation is not None
        # Compiled now, so that no step has to wait for it; and so are their fingerprints, which ranks compare.
        self._schedules = [compile_plan(each.plan, found.workload, found.cluster) for each in found.alternatives]
        for schedule in self._schedules:
            _ = schedule.fingerprint
        overlaps = self._settings.overlap is not None
        self._open_control()
        # Likewise: so many new objects let Python soon collect its garbage, which would take a step up to 0.5 s.
        gc.collect()

        schedules = zip(found.alternatives, self._schedules, strict=True)
        plans = [replace(found, plan=each.plan, schedule=schedule) for each, schedule in schedules]
        if (former := self._telling_plan()) is not None:
            plans.append(former.resolution)

        def use_plan(index: int, other: Engine) -> None:
            self._resolution = replace(self.resolution, plan=plans[index].plan, schedule=other.schedule)
            use(other)

        self._tuner = LiveTuner(
            found.alternatives,
            engine,
            BackgroundOpening(
                lambda index, rest: reserve(
                    plans[index].schedule, plans[index].cluster, TRIAL_CONNECT_TIMEOUT, self._control, rest
                )
            ),
            lambda index, resources: open_engine(plans[index].schedule, resources=resources),
            use_plan,
            self._settings.tuning,
            separate_group(self._settings.timeout) if overlaps else self._group,
            # Seconds of a step under another plan say nothing about this one.
            DriftWatch(self._changes, None if self._fell_back else self._preparation.expected, former is not None),
            self._prices(),
            overlaps,
            watches=self._meter is not None,
            former=former,
        )

    def _telling_plan(self) -> FormerPlan | None:
        """The plan from which links became slower, if its passes tell more about them than those of the present one."""
        former, found = self._former, self.resolution
        if former is None or not former.is_bearable:
            return None
        if former.resolution.workload.fingerprint != found.workload.fingerprint:
            return None
        # Collectives of the backend have no pace, so they become faster as the links do.
        messages = () if found.schedule is None else found.schedule.messages
        paced = any(message.on_trees for message in messages)
        return former if paced or former.resolution.plan != found.plan else None

    def _open_control(self) -> None:
        """Make the group over which plans are opened in trials, if plans may be tried; collective.

        All pairs of ranks connect, which takes seconds where hosts are distant. So ranks do it while one searches.
        """
        if self._may_try and self._control is None:
            self._control = new_group(timedelta(seconds=self._settings.timeout), description=OWN_GROUP)

    def _close_control(self) -> None:
        if self._control is not None:
            dist.destroy_process_group(self._control)
            self._control = None

    def _prices(self) -> PlanPrices | None:
        """Predictions to be made during training; None where an earlier job has measured the plan."""
        found = self.resolution
        if self._preparation is None or self._preparation.expected is not None or len(self._schedules) == 1:
            return None
        assert self._settings.tuning is not None
        overlaps = self._settings.overlap is not None
        limit = self._settings.tuning.search * (2 if overlaps else 1)  # of which two searches have found the plans
        plans = [each.plan for each in found.alternatives]
        return PlanPrices(
            found.workload, found.cluster, self._constants, plans, self._schedules[0], limit, overlaps=overlaps
        )

    def _open_first(self, open_engine: Callable[..., Engine]) -> Engine:
        # After a change of the links, training has begun and waits.
        timeout, self._fell_back = TRIAL_CONNECT_TIMEOUT if self._changes else CONNECT_TIMEOUT, False
        try:
            return open_engine(self.resolution.schedule, timeout)
        except OpeningError as error:  # on every rank
            self._resolution = found = fall_back(self.resolution, error)
            self._fell_back = True
            rank_zero_info(f"AutoSync: plan {found.plan.fingerprint} instead: {found.reason}")
            if self._preparation is not None and dist.get_rank(self._group) == 0:
                assert self._settings.tuning is not None
                # It is the plan of an earlier job. The next job would fail to open it again and try no other.
                forget(self._preparation, self._settings.tuning.cache)
        # Not in the handler: the error's traceback keeps the buffers of the engine that could not be opened.
        return open_engine(found.schedule, timeout)

    def measure_steps(self, engine: Engine) -> None:
        """Record the times of synchronized steps from now on; not during a backward pass.

        Args:
            engine: the engine in use.
        """
        if self._meter is None:
            self._meter = StepMeter(dist.get_rank(self._group), overlaps=self._settings.overlap is not None)
            if self._tuner is None:
                self._record(engine)
            else:
                self._tuner.watch()

    def step_figures(self) -> StepFigures | None:
        """The figures of the steps since the last call; None if there were none, or `measure_steps` was not called."""
        if self._meter is None:
            return None
        changes = self._plan_changes + sum(trial.accepted for trial in self._all_trials())
        return self._meter.take(self.resolution, self._constants, changes, self.trying)

    def _record(self, engine: Engine) -> None:
        """Time the passes of an engine without a tuner, which would do so."""
        if self._meter is not None:
            self._recorder = Recorder(len(engine.schedule.messages))
            engine.trace(self._recorder)

    def after_pass(self) -> bool:
        """Call on every rank at the end of each synchronized pass; collective.

        Returns:
            Whether links have changed, so that the replica needs another plan.

        Raises:
            ExchangeError: a rank was lost, or did not answer in time.
        """
        tuner, schedule = self._tuner, self.resolution.schedule
        if tuner is None:
            if self._meter is not None and self._recorder is not None and schedule is not None:
                self._meter.add(self._recorder.end(), schedule)
                self._recorder.begin()
            return False
        ended, reason = tuner.ended, tuner.after_pass()
        if self._meter is not None and schedule is not None:
            self._meter.add(tuner.trace, schedule)
        if tuner.ended and not ended:
            self._remember(tuner)
        return bool(reason) and self._measure_again(reason, tuner.slowing)

    def _remember(self, tuner: LiveTuner) -> None:
        """Keep what the tuner has found so far for later jobs."""
        assert self._preparation is not None
        assert self._settings.tuning is not None
        # Without the plan that ranks could not open, the search of this job was not complete.
        if dist.get_rank(self._group) == 0 and not self._fell_back:
            remember(self._preparation, tuner, self._settings.tuning.cache)

    def report(self) -> TuningReport:
        """What was chosen and tried so far, and why."""
        tuner, found = self._tuner, self._present
        plan, reason, trials = found.plan.fingerprint, found.reason, self._all_trials()
        if any(each.plan == plan and each.accepted for each in trials):
            reason = f"the fastest in trials; the job began with {reason}"
        return TuningReport(
            plan=plan,
            reason=reason,
            links="" if self.links is None else self.links.describe(),
            candidates=[
                (each.name, None if math.isnan(each.predicted) else each.predicted) for each in found.alternatives
            ],
            trials=trials,
            tuning=self._ended if tuner is None else tuner.state,
            checks=tuple(self._checks),
            resolution=found,
            constants=self._constants,
            measured=self._measured(),
            overlaps=None if self._settings.overlap is None else not why_no_overlap(found.plan, found.schedule),
        )

    @property
    def _present(self) -> Resolution:
        """What the job uses, but for a candidate that may be in use for a moment."""
        tuner, found = self._tuner, self.resolution
        if tuner is None:
            return found
        schedules = zip(tuner.alternatives, self._schedules, strict=True)
        schedule = next(schedule for each, schedule in schedules if each is tuner.present)
        return replace(found, plan=tuner.present.plan, schedule=schedule, alternatives=tuner.alternatives)

    def _measured(self) -> MeasuredSteps | None:
        """What `step_figures` told so far, with a typical step; None if steps were not measured."""
        meter = self._meter
        if meter is None or meter.typical is None or not meter.history:
            return None
        return MeasuredSteps(meter.rank, tuple(meter.history), *meter.typical)

    @property
    def _constants(self) -> Constants:
        return Constants() if self.links is None else self.links.constants

    def _all_trials(self) -> list[TrialReport]:
        return [*self._trials, *([] if self._tuner is None else self._tuner.trials)]

    def close(self) -> None:
        """Stop trials; the engine of the present plan is in use afterwards, and the only one that is open."""
        try:
            if (tuner := self._tuner) is not None:
                try:
                    self._tuner = None
                    self._ended = tuner.state if tuner.finished else "stopped before the end of trials"
                    self._trials += tuner.trials
                    self._resolution = replace(self.resolution, alternatives=tuner.alternatives)
                    if not tuner.ended and any(trial.accepted for trial in tuner.trials):
                        self._remember(tuner)
                finally:
                    tuner.close()
        finally:
            self._recorder = None
            self._close_control()

    def _prepare(self, also: Container[nn.Parameter]) -> Preparation | None:
        """Find links and plans, if the user gave no plan and links matter; collective.

        Raises:
            PlanError: (on every rank) ranks run different versions of Python, and may try plans.
        """
        if reason := self._why_untuned():
            self._ended = f"{_NO_OTHER}: {reason}"
            return None
        # Scripts may turn them on for some ranks only, and all ranks have to take the same way.
        if any(gather_json(torch.are_deterministic_algorithms_enabled(), self._group)):
            self._ended = f"{_NO_OTHER}: {_DETERMINISTIC}"
            rank_zero_info(f"AutoSync: {self._ended}")
            return None
        # Each rank chooses by its own arithmetic, whose last bits differ between versions (`math.hypot`, `NormalDist`).
        agree(platform.python_version_tuple, lambda found: {_PYTHON: ".".join(found[:2])}, self._group)
        found = prepare(
            self._settings,
            self._module,
            *self._shape,
            self._group,
            also,
            self.links,
            self._device,
            meanwhile=self._open_control,
        )
        if found.on_one_host:
            self._shape = 1, found.links.cluster.world_size  # the nodes of this job are one machine
            self._ended = f"{_NO_OTHER}: {_ONE_MACHINE}"
            return None
        self.links = found.links
        return found if self._device == "cpu" else self._measured_on_device(found, also)

    def _measured_on_device(self, found: Preparation, also: Container[nn.Parameter]) -> Preparation:
        """The preparation, with the plan that is fastest when measured; collective."""
        if found.proposals is None:
            return found
        chosen = choose_measured(
            found.proposals,
            variable_names(self._module, also),
            found.workload,
            found.links.cluster,
            self._group,
            self._two_level_collectives,
            self._settings.timeout,
            self._settings.bucket_bytes,
        )
        return replace(found, proposals=chosen)

    @property
    def _two_level_collectives(self) -> bool:
        # Groups for two levels are subsets of the default group, but a second module in Fabric has its own group.
        return self._group is None and dist.get_backend() == "nccl"

    def _why_untuned(self) -> str:
        """Why links and plans are not searched, as far as the settings tell; empty if they are."""
        settings, tuning = self._settings, self._settings.tuning
        nodes = self._shape[0] if settings.cluster is None else len(settings.cluster.nodes)
        if settings.plan is not None:
            return "the plan was given"
        if tuning is None:
            return "the strategy does not tune (tuning='off')"
        if nodes == 1:
            return _ONE_MACHINE
        if len({parameter.device for parameter in self._module.parameters()}) > 1:
            return "the model is on several devices"
        if self._device != "cpu" and not tuning.accelerators:
            return f"the model is on '{self._device}' (tuning={{'accelerators': True}} measures plans there)"
        if self._device != "cpu" and self._resolution is not None:
            return f"the model is on '{self._device}', where plans are measured before the first step only"
        if settings.cluster is None and not tuning.probe:
            return "links are neither described (cluster) nor measured (probe=0)"
        return ""

    def _measure_again(self, reason: str, slowing: tuple[PassTimes, PassTimes] | None = None) -> bool:
        """Measure the links again; returns whether they have changed. Collective.

        Args:
            slowing: times of a pass before and after it became slower, if that is the reason.
        """
        tuning = self._settings.tuning
        assert tuning is not None
        assert self.links is not None
        begin = time.monotonic()
        known = self.links
        found = find_links(None, *self._shape, tuning.probe, self._settings.timeout, known.constants)
        # Unlike processors may round rates differently, so rank 0 compares them for all.
        is_first = dist.get_rank(self._group) == 0
        words, changed = broadcast_json(compare_links(known, found) if is_first else None, self._group)
        self._checks.append(f"links were measured again in {time.monotonic() - begin:.1f} s, because {reason}. {words}")
        rank_zero_info(f"AutoSync: {self._checks[-1]}")
        if changed is not None:
            self.links = replace(found, cluster=ClusterSpec.from_dict(changed, source="the links of rank 0"))
            self._changes += 1
            self._former = None if slowing is None else FormerPlan(self._present, *slowing)
        return changed is not None
