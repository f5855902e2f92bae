"""`Replay`: prices a Schedule for a workload on a cluster, without the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.replay.chores import with_chores
from lightning_autosync.replay.compute import Chores, Compute, ComputeClock
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.fluid import Conditions, drain
from lightning_autosync.replay.frames import count_frames, run_frames
from lightning_autosync.replay.loads import LoadModel, Loads
from lightning_autosync.replay.network import Floats, Forest, Network
from lightning_autosync.replay.outcome import Outcome, StartOrder, critical_path
from lightning_autosync.replay.prediction import MessageSpan, Prediction, Span, Timeline
from lightning_autosync.replay.stages import Stage, Stager
from lightning_autosync.workload import Workload

Detail = Literal["auto", "frames", "fluid"]

FRAMES_LIMIT = 1500
"""Frames of a step up to which ``auto`` follows each of them."""
_STEPS = 5
"""Steps, at most, until the token buckets of the links are the same after each."""
_STEADY = 0.01
"""Share of all tokens that may differ then."""


class Replay:
    """Prices schedules for one workload on one cluster; what does not depend on the schedule is worked out once.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """

    def __init__(self, workload: Workload, cluster: ClusterSpec, constants: Constants | None = None) -> None:
        self._workload = workload
        self._cluster = cluster
        self._constants = constants or Constants()
        self._network = Network(cluster, self._constants)
        self._forest = Forest(self._network)
        self._stager = Stager(workload, self._forest, self._constants)
        self._loads = LoadModel(self._network, self._forest, self._constants)
        self._clock = ComputeClock(workload, self._constants)
        self._names = self._network.channel_names()[: self._network.links]
        self._numel = {variable.name: variable.numel for variable in workload.variables}
        self._speeds = [cluster.nodes[index].speed for index in cluster.rank_nodes]

    def predict(self, schedule: Schedule, detail: Detail = "auto") -> Prediction:
        """The time and the timeline of a step.

        Args:
            schedule: compiled for this workload and cluster.
            detail: ``frames`` follows every piece of every message, and connections share links max-min fairly;
                ``fluid`` lets each message flow as a whole, which is hundreds of times faster, and messages share a
                link in proportion to the rates that they would have alone; ``auto`` takes frames where there are few.

        Raises:
            PlanError: the schedule is for another number of ranks, or a message is not of this workload's variables.
            ValueError: ``detail`` is none of these.
        """
        self._check(schedule)
        if detail not in get_args(Detail):
            raise ValueError(f"detail: {detail!r} is not known; allowed: {', '.join(get_args(Detail))}")
        stages = self._stages(schedule)
        launch_costs = [0.0] * len(schedule.messages)
        for stage in stages:
            if not stage.deferred:
                launch_costs[stage.message] += stage.launch
        computes = {speed: self._clock.run(schedule, launch_costs, speed) for speed in sorted(set(self._speeds))}
        slowest = computes[min(computes)]
        shared = self._network.shared_core >= 0
        chores = self._clock.chores(schedule, launch_costs, min(computes)) if shared else None
        order = StartOrder.of(schedule, stages, slowest, chores)
        loads = self._loads.loads(stages)
        in_frames = detail == "frames" or (
            detail == "auto" and count_frames(stages, self._network.ranks) <= FRAMES_LIMIT
        )
        starts = [computes[speed] for speed in self._speeds] if in_frames else None
        tokens = self._network.burst.copy()
        for _ in range(_STEPS):
            before = tokens.copy()
            outcome = self._run(stages, loads, order, starts, chores, tokens)
            prediction, tokens = self._prediction(
                schedule, stages, loads, order, computes, chores, outcome, before, tokens
            )
            if abs(tokens - before).sum() <= _STEADY * self._network.burst.sum():
                break
        return prediction

    def _check(self, schedule: Schedule) -> None:
        if schedule.world_size != self._cluster.world_size:
            raise PlanError(
                f"schedule: it is for {schedule.world_size} ranks, cluster '{self._cluster.name}' has "
                f"{self._cluster.world_size}"
            )
        for message in schedule.messages:
            if foreign := set(message.variables) - self._numel.keys():
                raise PlanError(f"schedule: '{min(foreign)}' is no variable of workload '{self._workload.name}'")
            if message.numel != (numel := sum(self._numel[name] for name in message.variables)):
                raise PlanError(
                    f"schedule: message '{message.name}' has {message.numel} elements, its variables in workload "
                    f"'{self._workload.name}' have {numel}"
                )

    def _stages(self, schedule: Schedule) -> list[Stage]:
        if self._network.ranks == 1:
            return [Stage(message.index, message.collective) for message in schedule.messages]
        return [stage for message in schedule.messages for stage in self._stager.stages(message)]

    def _run(
        self,
        stages: Sequence[Stage],
        loads: Loads,
        order: StartOrder,
        starts: Sequence[Compute] | None,
        chores: Chores | None,
        tokens: Floats,
    ) -> Outcome:
        """One step, in frames where there are ``starts``; ``tokens`` are changed."""
        network, constants = self._network, self._constants
        if starts is not None:
            return run_frames(stages, order, loads, starts, chores, network, self._forest, constants, tokens)
        conditions = Conditions(
            loads.work, loads.fill, order.release, order.delay, order.after, order.urgency, order.queue, loads.rivals()
        )
        if chores is not None:
            conditions = with_chores(conditions, chores, network)
        times = drain(conditions, network.capacities, constants.collectives, tokens, network.burst)
        count = len(stages)
        packed = float(times.end[count:].max(initial=0.0))
        return Outcome(
            start=times.start[:count],
            served=times.served[:count],
            drained=times.drained[:count],
            end=times.end[:count],
            bound=times.bound[:count],
            packed=packed,
        )

    def _prediction(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        loads: Loads,
        order: StartOrder,
        computes: dict[float, Compute],
        chores: Chores | None,
        outcome: Outcome,
        before: Floats,
        tokens: Floats,
    ) -> tuple[Prediction, Floats]:
        """What a step takes; and the tokens at its end, given those ``before`` it and those when its last byte left."""
        slowest = computes[min(computes)]
        spans, synchronized = _message_spans(schedule, stages, slowest, outcome)
        optimizer = [self._workload.optimizer_time / speed for speed in self._speeds]
        step_time = synchronized + max(optimizer)
        # What a step leaves in the links' buckets, and what comes in until it ends, is there for the next one.
        idle = max(0.0, step_time - float(outcome.end.max(initial=0.0)))
        rested = numpy.minimum(tokens + idle * self._network.capacities, self._network.burst)
        busy = self._busy(loads.work.sum(axis=0) - (before - rested), step_time)
        links = self._network.links
        demand = numpy.zeros((len(schedule.messages), len(busy)))
        numpy.add.at(demand, [stage.message for stage in stages], loads.work / self._network.capacities)
        timeline = Timeline(
            step_time,
            tuple(spans),
            tuple(
                _compute_spans(computes[speed], synchronized, seconds)
                for speed, seconds in zip(self._speeds, optimizer, strict=True)
            ),
            dict(zip(self._names, numpy.clip(busy[:links], 0.0, 1.0).tolist(), strict=True)),
        )
        prediction = Prediction(
            step_time=step_time,
            synchronization_time=synchronized - min((span.start for span in spans), default=synchronized),
            timeline=timeline,
            hosts=tuple(busy[links : links + self._network.ranks].tolist()),
            cores=None if chores is None or not step_time else self._shared_cores(busy, chores, step_time),
            critical_path=critical_path(
                schedule, stages, order, outcome, slowest, synchronized, step_time, self._bottlenecks
            ),
            demand=demand,
        )
        return prediction, rested

    def _busy(self, passed: Floats, step_time: float) -> Floats:
        """[channels] the part of what each gives in a step that was taken; ``passed`` without what an earlier step left
        in the links' buckets."""
        return passed / self._network.capacities / step_time if step_time else numpy.zeros_like(passed)

    def _shared_cores(self, busy: Floats, chores: Chores, step_time: float) -> float:
        """Share of the step in which the cores that all ranks share are busy."""
        shared = self._network.shared_core
        main_threads = self._network.ranks * sum(chores.core) / float(self._network.capacities[shared])
        return float(busy[shared]) + main_threads / step_time

    @property
    def _bottlenecks(self) -> tuple[str, ...]:
        return self._network.channel_names()


def replay(
    schedule: Schedule,
    workload: Workload,
    cluster: ClusterSpec,
    constants: Constants | None = None,
    detail: Detail = "auto",
) -> Prediction:
    """Price one schedule; for several on the same cluster, keep a `Replay`."""
    return Replay(workload, cluster, constants).predict(schedule, detail)


def _message_spans(
    schedule: Schedule, stages: Sequence[Stage], slowest: Compute, outcome: Outcome
) -> tuple[list[MessageSpan], float]:
    """Each message; and when the slowest rank has taken the last sum."""
    count = len(schedule.messages)
    first, last = [len(stages)] * count, [0] * count
    now = max(slowest.backward, outcome.packed)
    finish = numpy.zeros(count)
    for number, stage in enumerate(stages):
        first[stage.message] = min(first[stage.message], number)
        last[stage.message] = max(last[stage.message], number)
        finish[stage.message] += stage.finish
        if stage.deferred:
            now = max(now, float(outcome.start[number]))
    spans = []
    for message in schedule.messages:
        now = max(now, float(outcome.end[last[message.index]])) + float(finish[message.index])
        start, end = float(outcome.served[first[message.index]]), float(outcome.end[last[message.index]])
        spans.append(MessageSpan(message.name, start, end, slowest.ready[message.index]))
    return spans, now


def _compute_spans(compute: Compute, synchronized: float, optimizer: float) -> tuple[Span, ...]:
    return (
        Span("forward", 0.0, compute.forward),
        Span("backward", compute.forward, compute.backward),
        Span("optimizer", synchronized, synchronized + optimizer),
    )
