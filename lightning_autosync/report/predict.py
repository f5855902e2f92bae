"""The prediction of a plan without a cluster, as text, pictures and data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from lightning_autosync.cluster import ClusterSpec, Limit, synchronization_limit
from lightning_autosync.documents import Result, seconds_text
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import (
    Bound,
    Constants,
    Prediction,
    Replay,
    Span,
    Timeline,
    least_overlapped_step,
    least_step,
    overlapped_timeline,
    synchronization_bound,
)
from lightning_autosync.replay.shares import MicroBatches, micro_batched, shared_step_time
from lightning_autosync.report.timeline import write_timelines
from lightning_autosync.workload import Workload

CUT_BOUND: Literal["cut bound"] = "cut bound"
"""Kind of bound for a cluster too large for the linear program: no exact plan is faster, but none may be as fast."""
ASSUMED = "sums form along trees of ranks to roots, none in switches; no latencies"
"""The assumptions of the bound."""
_BUSIEST = 8
"""Number of links in each list of the text."""


class PredictionResult(Result):
    """``autosync-prediction/1``: a `Prediction` without the demand, which would be too large, and its bounds.

    Attributes:
        step_bound: least seconds of a step under an exact plan.
        synchronization_bound: least seconds of a synchronization.
        bounds_are: ``exact``, or ``cut bound``.
        bound_share: ``step_bound`` divided by the step time of an exact plan; None for other plans.
        shared_step_time: seconds of the step if ranks computed parts of each global batch in proportion to their speeds
            (``batch_shares``); None if all are equally fast.
        micro_batched_step_time: the same with whole numbers of micro-batches; None if none were asked for.
        overlapped_step_time: seconds of the step with ``overlap="step"``; None if there is no computation.
        overlapped_step_bound: least seconds of it under an exact plan; None if there is no computation.
        binding: share of each link's direction in the bound on the rate of synchronization, by "source > target".
        prices: price of a byte on each of these, which proves the bound (`Limit`); empty in older files.
    """

    FORMAT: ClassVar[str] = "autosync-prediction/1"

    step_time: float
    synchronization_time: float
    timeline: Timeline
    hosts: tuple[float, ...]
    cores: float | None
    critical_path: tuple[Span, ...]
    step_bound: float
    synchronization_bound: float
    bounds_are: Literal["exact", "cut bound"]
    bound_share: float | None
    binding: dict[str, float]
    shared_step_time: float | None = None
    micro_batched_step_time: float | None = None
    overlapped_step_time: float | None = None
    overlapped_step_bound: float | None = None
    prices: dict[str, float] = Field(default_factory=dict)

    def figures(self) -> dict[str, str]:
        found = {"step": seconds_text(self.step_time), "step bound": seconds_text(self.step_bound)}
        return found if self.bound_share is None else {**found, "of bound": f"{self.bound_share:.1%}"}


def predict(
    plan: SyncPlan,
    workload: Workload,
    cluster: ClusterSpec,
    directory: str | os.PathLike[str] | None = None,
    constants: Constants | None = None,
    source: str = "plan",
    micro_batches: tuple[int, int] | None = None,
) -> str:
    """The predicted step of a plan as text; with a ``directory`` also as pictures and data.

    With computation, the pictures also show the step with overlap, from the beginning of its backward pass. The files
    are ``timeline.svg``, ``timeline.png``, ``trace.json`` (for Chrome's viewer) and ``result.json``.
    ``source`` names the plan in errors. ``micro_batches`` are the samples of a data loader's batch and of a
    micro-batch, for the step with both; see `micro_batched`.

    Raises:
        DocumentError: the global batch has no whole number of micro-batches.
        PlanError: plan, workload and cluster do not fit each other.
        ClusterError: the rates of the cluster are unknown.
    """
    constants = constants or Constants()
    schedule, replay = compile_plan(plan, workload, cluster, source), Replay(workload, cluster, constants)
    prediction = replay.predict(schedule)
    overlapped = overlapped_timeline(schedule, workload, replay, prediction)
    shared = _Shared(
        shared_step_time(schedule, workload, cluster, constants),
        shared_step_time(schedule, workload, cluster, constants, overlaps=True),
        None if micro_batches is None else micro_batched(schedule, workload, cluster, constants, *micro_batches),
    )
    bounds = _Bounds(
        least_step(workload, cluster, constants.framing, constants.burst),
        least_overlapped_step(workload, cluster, constants.framing, constants.burst),
        synchronization_bound(workload, cluster, constants.framing, constants.burst),
        plan.semantics,
        synchronization_limit(cluster),
    )
    if directory is not None:
        computes = workload.forward_time + workload.backward_time > 0
        _write(prediction, bounds, overlapped if computes else None, shared, Path(directory))
    return _text(prediction, bounds, overlapped.step_time, shared)


@dataclass(frozen=True)
class _Shared:
    """The step with batch shares, with these and overlap, and with micro-batches."""

    step_time: float | None
    overlapped: float | None
    micro: MicroBatches | None


@dataclass(frozen=True)
class _Bounds:
    """Lower bounds on times of exact plans, the semantics of the predicted plan, and the limit behind the bounds."""

    step: Bound
    overlapped: float
    synchronization: float
    semantics: str
    limit: Limit

    def share(self, step_time: float) -> float | None:
        """The bound divided by the step time of an exact plan; None for other plans, which may beat the bound."""
        return self.step.seconds / step_time if self.semantics == "exact" else None


def _write(
    prediction: Prediction, bounds: _Bounds, overlapped: Timeline | None, shared: _Shared, directory: Path
) -> None:
    timelines = {"predicted": prediction.timeline}
    if overlapped is not None:
        timelines["predicted with overlap"] = overlapped
    write_timelines(timelines, directory)
    PredictionResult(
        step_time=prediction.step_time,
        synchronization_time=prediction.synchronization_time,
        timeline=prediction.timeline,
        hosts=prediction.hosts,
        cores=prediction.cores,
        critical_path=prediction.critical_path,
        step_bound=bounds.step.seconds,
        synchronization_bound=bounds.synchronization,
        bounds_are="exact" if bounds.step.exact else CUT_BOUND,
        bound_share=bounds.share(prediction.step_time),
        shared_step_time=shared.step_time,
        micro_batched_step_time=None if shared.micro is None else shared.micro.step_time,
        overlapped_step_time=None if overlapped is None else overlapped.step_time,
        overlapped_step_bound=None if overlapped is None else bounds.overlapped,
        binding=bounds.step.binding,
        prices=dict(bounds.limit.prices),
    ).write(directory)


def _text(prediction: Prediction, bounds: _Bounds, overlapped: float, shared: _Shared) -> str:
    step, least, share = prediction.step_time, bounds.step.seconds, bounds.share(prediction.step_time)
    reached = f"of exact plans; this one is {bounds.semantics}" if share is None else f"{share:.0%} reached"
    cut = "" if bounds.step.exact else f", {CUT_BOUND}"
    lines = [
        f"step                 {seconds_text(step):>12}",
        f"step with overlap    {seconds_text(overlapped):>12}",
        f"bound with overlap   {seconds_text(bounds.overlapped):>12} (of exact plans)",
        f"step bound           {seconds_text(least):>12} ({reached}{cut})",
        f"synchronization      {seconds_text(prediction.synchronization_time):>12}",
        f"synchronization bound{seconds_text(bounds.synchronization):>12}{f' ({CUT_BOUND})' if cut else ''}",
    ]
    if shared.overlapped is not None:
        lines.insert(2, f"shares with overlap  {seconds_text(shared.overlapped):>12}")
    if shared.micro is not None:
        lines.insert(1, f"step, micro-batches  {seconds_text(shared.micro.step_time):>12} ({shared.micro.told})")
    if shared.step_time is not None:
        seconds = seconds_text(shared.step_time)
        lines.insert(1, f"step, batch shares   {seconds:>12} (each rank's part of a batch as its speed)")
    if bounds.step.binding:
        lines.append("links that set the synchronization bound, and the price of a byte on each")
    told = bounds.step.binding_lines(_BUSIEST)
    named = zip(told[:_BUSIEST], bounds.step.binding, strict=False)
    lines += [f"  {line}, {bounds.limit.prices[name]:.4g}" for line, name in named]
    lines += [f"  {line}" for line in told[_BUSIEST:]]
    if bounds.step.binding:
        lines.append(f"  prices x bandwidths: {bounds.limit.rate / 1e6:.4g} MB/s; {ASSUMED}")
    lines.append("busiest links")
    busiest = sorted(prediction.timeline.links.items(), key=lambda item: -item[1])[:_BUSIEST]
    lines += [f"  {name:30s} {busy:6.1%}" for name, busy in busiest]
    lines.append("critical path")
    lines += [f"  {seconds_text(span.start):>12}  {span.name}" for span in prediction.critical_path]
    return "\n".join(lines) + "\n"
