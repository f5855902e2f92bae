"""`Replay`: predicts the step time of a Schedule for a workload on a cluster, without the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import unknown_name
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.replay.compute import Compute, ComputeClock, HostWork
from lightning_autosync.replay.conditions import SpeedClass, classify, stage_conditions
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.fluid import drain
from lightning_autosync.replay.frames import Run, count_frames, prepare_frames
from lightning_autosync.replay.loads import LoadModel, Loads
from lightning_autosync.replay.network import Floats, Forest, NetworkArrays
from lightning_autosync.replay.outcome import StageTimes, StartOrder, critical_path
from lightning_autosync.replay.prediction import MessageSpan, Prediction, Span, Timeline
from lightning_autosync.replay.stages import Stage, StageMaker
from lightning_autosync.workload import Variable, Workload

Detail = Literal["auto", "frames", "fluid"]

FRAMES_LIMIT = 40_000
"""Largest number of frames in a step for which ``auto`` simulates frames: a step of so many takes 0.2 to 0.6 s. It is
simulated two to `_STEPS` times if TCP's windows may limit a connection."""
_STEPS = 5
"""Largest number of repeated steps until the links' token buckets and the congestion windows are in a steady state."""
_STEADY = 0.01
"""Share of all tokens that may change in a steady step."""
_EQUAL = 0.003
"""Relative difference up to which the times of two steps count as equal."""


@dataclass(frozen=True)
class _Step:
    """A schedule prepared for replay.

    Attributes:
        stages: its stages, message by message.
        order: conditions of the stages' starts.
        ranks: [ranks] compute timelines.
        slowest: compute timeline of the slowest rank.
        host_work: [ranks] the main threads' work on shared cores; None if ranks have cores of their own.
    """

    schedule: Schedule
    stages: list[Stage]
    loads: Loads
    order: StartOrder
    ranks: list[Compute]
    slowest: Compute
    host_work: list[HostWork] | None


class Replay:
    """Predicts step times of schedules for one workload on one cluster; reuses all that is common to schedules.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """

    def __init__(self, workload: Workload, cluster: ClusterSpec, constants: Constants | None = None) -> None:
        self._workload = workload
        self._cluster = cluster
        self._constants = constants or Constants()
        self._network = NetworkArrays(cluster, self._constants)
        self._forest = Forest(self._network)
        self._stage_maker = StageMaker(workload, self._forest, self._constants)
        self._loads = LoadModel(self._network, self._forest, self._constants)
        self._clock = ComputeClock(workload, self._constants, self._network.ranks)
        self._numel = {variable.name: variable.numel for variable in workload.variables}
        ranks = self._network.ranks
        # All ranks have this work at once, before the first gradient and after the last message.
        self._pass = self._constants.crowd(ranks) * self._constants.pass_cost if ranks > 1 else 0.0
        self._speeds = [cluster.nodes[index].speed for index in cluster.rank_nodes]

    def predict(self, schedule: Schedule, detail: Detail = "auto") -> Prediction:
        """Predict the time and the timeline of a step.

        Args:
            schedule: a schedule compiled for this workload and cluster.
            detail: ``frames`` simulates every piece of every message; connections share links max-min fairly.
                ``fluid`` treats each message as one flow, which is hundreds of times faster; messages share a link in
                proportion to their rates alone. ``auto`` simulates frames if there are few.

        Raises:
            PlanError: the schedule is for another number of ranks, or its messages do not fit the workload's variables.
            ValueError: ``detail`` has another value.
        """
        self._check(schedule)
        if detail not in get_args(Detail):
            raise ValueError(f"detail: {detail!r} is {unknown_name(detail, get_args(Detail))}")
        step = self._prepare(schedule)
        frames = count_frames(step.stages, self._network.ranks)
        in_frames = detail == "frames" or (detail == "auto" and frames <= FRAMES_LIMIT)
        run, windows = self._prepare_frames(step) if in_frames else (self._prepare_fluid(step), False)
        tokens = self._network.burst.copy()
        step_time = 0.0
        # A step starts with the tokens and windows that the step before left. Repeat it until these are steady.
        for _ in range(_STEPS):
            before, passed = tokens.copy(), step_time
            times, packed = run(tokens, passed)
            spans, synchronized = _message_spans(step, times, packed)
            synchronized += self._pass
            step_time = synchronized + self._workload.optimizer_time / min(self._speeds)
            # Buckets continue to fill between the end of the last stage and the end of the step.
            idle = max(0.0, step_time - float(times.end.max(initial=0.0)))
            tokens = numpy.minimum(tokens + idle * self._network.capacities, self._network.burst)
            steady = abs(tokens - before).sum() <= _STEADY * self._network.burst.sum()
            if steady and (not windows or abs(step_time - passed) <= _EQUAL * step_time):
                break
        carried = step.loads.work.sum(axis=0) - (before - tokens)
        return self._prediction(step, times, spans, synchronized, step_time, carried, frames)

    def _prepare(self, schedule: Schedule) -> _Step:
        if self._network.ranks == 1:
            stages = [Stage(message.index, message.collective) for message in schedule.messages]
        else:
            stages = [stage for message in schedule.messages for stage in self._stage_maker.stages(message)]
        launch_costs = [0.0] * len(schedule.messages)
        for stage in stages:
            if not stage.deferred:
                launch_costs[stage.message] += stage.launch
        computes = {speed: self._clock.run(schedule, launch_costs, speed) for speed in set(self._speeds)}
        slowest = min(computes)
        shared = self._network.shared_core >= 0
        works = {speed: self._clock.host_work(schedule, launch_costs, speed) for speed in computes} if shared else {}
        order = StartOrder.of(schedule, stages, computes[slowest], works.get(slowest))
        ranks = [computes[speed] for speed in self._speeds]
        host_work = [works[speed] for speed in self._speeds] if shared else None
        return _Step(schedule, stages, self._loads.loads(stages), order, ranks, computes[slowest], host_work)

    def _check(self, schedule: Schedule) -> None:
        if schedule.world_size != self._cluster.world_size:
            raise PlanError(
                f"schedule: it is for {schedule.world_size} ranks, cluster '{self._cluster.name}' has "
                f"{self._cluster.world_size}"
            )
        for message in schedule.messages:
            if foreign := set(message.variables) - self._numel.keys():
                raise PlanError(f"schedule: '{min(foreign)}' is not a parameter of workload '{self._workload.name}'")
            if message.numel != (numel := sum(self._numel[name] for name in message.variables)):
                raise PlanError(
                    f"schedule: message '{message.name}' has {message.numel} elements, its variables in workload "
                    f"'{self._workload.name}' have {numel}"
                )

    def _prepare_frames(self, step: _Step) -> tuple[Run, bool]:
        return prepare_frames(
            step.stages,
            step.order,
            step.loads,
            step.ranks,
            step.host_work,
            self._network,
            self._forest,
            self._constants,
        )

    def _prepare_fluid(self, step: _Step) -> Run:
        """Prepare a step with each stage as one flow, which no window limits; otherwise like `prepare_frames`."""
        network, count, classes = self._network, len(step.stages), self._speed_classes(step)
        conditions, paces = stage_conditions(
            step.stages, step.loads, step.order, classes, self._loads, network, self._forest.trees
        )
        channels, no_tokens = len(network.capacities), numpy.zeros(len(paces.pairs))
        capacities = numpy.concatenate([network.capacities, paces.rates])
        burst = numpy.concatenate([network.burst, no_tokens])
        # The slowest class comes first; its last part of host work ends last.
        last = count + len(step.host_work[0].core) - 1 if step.host_work else -1

        def run(tokens: Floats, _: float) -> tuple[StageTimes, float]:
            padded = numpy.concatenate([tokens, no_tokens])
            times = drain(conditions, capacities, self._constants.collectives, padded, burst)
            tokens[:] = padded[:channels]
            numpy.minimum.at(times.moved, conditions.whole, times.moved.copy())
            paced = times.bound >= channels
            times.bound[paced] = channels + paces.pairs[times.bound[paced] - channels]
            of_stages = StageTimes._make(each[:count] for each in times)
            return of_stages, float(times.end[last]) if step.host_work else 0.0

        return run

    def _speed_classes(self, step: _Step) -> list[SpeedClass]:
        """The ranks by speed, the slowest first."""
        of_rank = classify(self._speeds)
        classes = []
        for number in range(int(of_rank.max()) + 1):
            ranks = of_rank == number
            slowest = min(numpy.flatnonzero(ranks).tolist(), key=lambda rank: self._speeds[rank])
            host_work = step.host_work[slowest] if step.host_work else None
            classes.append(SpeedClass(ranks, step.ranks[slowest], host_work))
        return classes

    def _taking(self, step: _Step) -> tuple[float, ...]:
        """[messages] seconds of a main thread to take a message's sum and to make its step by itself."""
        constants = self._constants
        crowd = constants.crowd(self._network.ranks)
        taking = [
            crowd * (constants.step_cost + len(message.variables) * constants.due_cost)
            for message in step.schedule.messages
        ]
        for stage in step.stages:
            taking[stage.message] += stage.finish
        return tuple(taking)

    def _prediction(
        self,
        step: _Step,
        times: StageTimes,
        spans: list[MessageSpan],
        synchronized: float,
        step_time: float,
        carried: Floats,
        frames: int,
    ) -> Prediction:
        """The prediction of a step; ``carried`` [channels] is each channel's load without the tokens it used up."""
        network = self._network
        links, ranks = network.links, network.ranks
        busy = carried / network.capacities / step_time if step_time else numpy.zeros_like(carried)
        demand = numpy.zeros((len(spans), len(busy)))
        numpy.add.at(demand, [stage.message for stage in step.stages], step.loads.work / network.capacities)
        cores = None
        if step.host_work is not None and step_time:
            main_threads = ranks * sum(step.host_work[0].core) / float(network.capacities[network.shared_core])
            cores = float(busy[network.shared_core]) + main_threads / step_time
        optimizer = (self._workload.optimizer_time / speed for speed in self._speeds)
        compute = tuple(
            _compute_spans(rank, synchronized, seconds) for rank, seconds in zip(step.ranks, optimizer, strict=True)
        )
        names = network.channel_names()
        use = dict(zip(names, numpy.clip(busy[:links], 0.0, 1.0).tolist(), strict=False))
        return Prediction(
            step_time=step_time,
            synchronization_time=synchronized - min((span.start for span in spans), default=synchronized),
            timeline=Timeline(step_time, tuple(spans), compute, use),
            hosts=tuple(busy[links : links + ranks].tolist()),
            cores=cores,
            critical_path=critical_path(
                step.schedule, step.stages, step.order, times, step.slowest, synchronized, step_time, names
            ),
            demand=demand,
            frames=frames,
            taking=self._taking(step),
            passing=self._pass,
        )


def _message_spans(step: _Step, times: StageTimes, packed: float) -> tuple[list[MessageSpan], float]:
    """The span of each message, and the time when the slowest rank has unpacked the last sum."""
    count = len(step.schedule.messages)
    start, end = numpy.full(count, numpy.inf), numpy.zeros(count)
    now = max(step.slowest.backward, packed)
    finish = numpy.zeros(count)
    for number, stage in enumerate(step.stages):
        start[stage.message] = min(start[stage.message], times.moved[number])
        end[stage.message] = max(end[stage.message], times.end[number])
        finish[stage.message] += stage.finish
        if stage.deferred:
            now = max(now, float(times.start[number]))
    spans = []
    for message in step.schedule.messages:
        began, ended = float(start[message.index]), float(end[message.index])
        now = max(now, ended) + float(finish[message.index])
        spans.append(MessageSpan(message.name, began, ended, step.slowest.ready[message.index]))
    return spans, now


def _compute_spans(compute: Compute, synchronized: float, optimizer: float) -> tuple[Span, ...]:
    return (
        Span("forward", 0.0, compute.forward),
        Span("backward", compute.forward, compute.backward),
        Span("optimizer", synchronized, synchronized + optimizer),
    )


@cache
def warm_up() -> None:
    """Predict a tiny step, so that later predictions of this process take no time to load or compile code.

    The first call on a machine compiles, which takes about 20 seconds of a core. Later processes load the result from
    numba's cache beside this package, in a fraction of a second. Where that folder cannot be written, numba keeps its
    cache in the user's.
    """
    workload = Workload(name="tiny", variables=(Variable(name="one", shape=(1000,)),))
    cluster = ClusterSpec.uniform(3, bandwidth=1e9)
    replay = Replay(workload, cluster)
    for name, topology in (("all_reduce", "native"), ("all_reduce", "recursive_doubling"), ("byteps", "star")):
        schedule = compile_plan(builders.build(name, workload, cluster, topology=topology), workload, cluster)
        replay.predict(schedule, "fluid")
        replay.predict(schedule, "frames")
