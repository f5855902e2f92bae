"""The HTML page of a job that tunes itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_autosync.documents import as_yaml, bytes_text, counted, write_text
from lightning_autosync.measure.traced_step import timeline_of
from lightning_autosync.replay import Timeline
from lightning_autosync.report.figures.cluster import cluster_picture
from lightning_autosync.report.figures.history import history_picture
from lightning_autosync.report.figures.picture import Picture
from lightning_autosync.report.figures.plan import plan_picture
from lightning_autosync.report.plan_view import PlanView, message_rows
from lightning_autosync.report.rendering import milliseconds, rate_text, render
from lightning_autosync.report.timeline import steps_picture
from lightning_autosync.strategy.tuning.report import MeasuredSteps, TrialReport, TuningReport
from lightning_autosync.strategy.tuning.step_meter import computing


def write_page(report: TuningReport, path: Path) -> None:
    """Write the report of a job as a single self-contained HTML file.

    Raises:
        UnwritableError: the file cannot be written.
    """
    view, measured = _view(report), report.measured
    page = render(
        "job.html",
        title=f"Synchronization of {view.workload.name}",
        report=report,
        headlines=[] if measured is None else list(_headlines(measured, not report.rates_fault)),
        measured={} if measured is None else _measured(measured),
        overlapped=measured is not None and measured.trace.overlapped,
        prediction=view.prediction,
        messages=list(message_rows(view)),
        plan_text=as_yaml(view.plan.to_dict(), width=100),
        has_links=bool(report.resolution.cluster.links),
        shares=list(_shares(report)),
        pictures={picture.name: picture for picture in _pictures(report, view)},
        candidates=list(_candidates(report)),
        trials=[_trial(each) for each in report.trials],
        facts=_facts(report),
    )
    write_text(path, page)


def _view(report: TuningReport) -> PlanView:
    """The plan; its prediction has the computation of the measured step, if there is one."""
    found, measured = report.resolution, report.measured
    workload = found.workload
    if measured is not None and not measured.trace.overlapped:
        trace = measured.trace
        workload = computing(found, measured.rank, trace.forward, trace.backward - trace.forward)
    return PlanView.of(found.plan, workload, found.cluster, report.constants, found.schedule)


def _pictures(report: TuningReport, view: PlanView) -> Iterator[Picture]:
    yield plan_picture(view.plan, view.schedule, view.workload)
    if view.traffic is not None and report.resolution.cluster.links:
        cluster = cluster_picture(report.resolution.cluster, view.traffic)
        if cluster is not None:
            yield cluster
    if report.measured is not None:
        yield _history(report.measured)
    if timelines := _timelines(report, view):
        yield steps_picture(timelines)


def _history(measured: MeasuredSteps) -> Picture:
    steps, figures = zip(*measured.history, strict=True)
    seconds, waits = [one.step_time for one in figures], [one.wait for one in figures]
    changes = [
        step
        for step, before, after in zip(steps[1:], figures, figures[1:], strict=False)
        if after.plan_changes > before.plan_changes
    ]
    return history_picture(steps, seconds, waits, changes)


def _timelines(report: TuningReport, view: PlanView) -> dict[str, Timeline]:
    made: dict[str, Timeline] = {}
    measured = report.measured
    if measured is not None:
        made[f"measured on rank {measured.rank}"] = timeline_of(measured.schedule, [measured.trace], {})
    if view.prediction is not None and view.prediction.step_time:
        overlapped = measured is not None and measured.trace.overlapped
        made["predicted, not overlapped" if overlapped else "predicted"] = view.prediction.timeline
    return made


def _headlines(measured: MeasuredSteps, knows_rates: bool) -> Iterator[dict[str, str]]:
    """The large numbers at the top of the page: the last figures of the job."""
    _, figures = measured.history[-1]
    yield {"value": milliseconds(figures.step_time), "what": "a step"}
    yield {"value": milliseconds(figures.wait), "what": "of it waits for gradients"}
    if figures.overlap is not None:
        yield {"value": f"{figures.overlap:.0%}", "what": "of communication hidden behind computation"}
    if figures.share_of_bound is not None and knows_rates:
        yield {"value": f"{figures.share_of_bound:.0%}", "what": "of the speed bound of exact plans"}


def _measured(measured: MeasuredSteps) -> dict[str, str]:
    """What else was measured, in words."""
    steps, figures = measured.history[-1]
    facts = {"steps": f"{steps}, measured on rank {measured.rank}"}
    if figures.bytes is not None:
        facts["sent"] = f"{bytes_text(figures.bytes)} a step by this rank"
    if figures.overlapped_steps is not None:
        facts["overlapped"] = f"{figures.overlapped_steps:.0%} of the steps ended their backward pass without a wait"
    if figures.batch_share is not None:
        facts["batch share"] = f"{figures.batch_share:.1%} of each global batch on this rank"
    return facts


def _candidates(report: TuningReport) -> Iterator[dict[str, Any]]:
    """The rows of the table of candidates: plans in the order in which they could be tried."""
    for each in report.resolution.alternatives:
        plan = each.plan.fingerprint
        yield {
            "name": each.name,
            "plan": plan,
            "messages": len(each.plan.groups),
            "predicted": "" if math.isnan(each.predicted) else milliseconds(each.predicted),
            "in_use": plan == report.plan,
        }


def _shares(report: TuningReport) -> Iterator[dict[str, Any]]:
    """The rows of the table of batch shares: a row for each change."""
    for each in report.batch_shares:
        yield {"place": each.place, "shares": each.texts, "why": each.why}


def _trial(trial: TrialReport) -> dict[str, Any]:
    return {
        "name": trial.name,
        "plan": trial.plan,
        "against": trial.against,
        "speedup": f"{trial.speedup:.2f}x",
        "seconds": milliseconds(trial.seconds),
        "steps": f"{trial.steps[1]} and {trial.steps[0]}",
        "accepted": trial.accepted,
    }


def _facts(report: TuningReport) -> dict[str, str]:
    workload, cluster = report.resolution.workload, report.resolution.cluster
    facts = {
        "model": f"{workload.name}: {counted(len(workload.variables), 'parameter')}, "
        f"{bytes_text(workload.bytes)} of gradients",
        "cluster": f"{cluster.name}: {counted(cluster.world_size, 'rank')} on {counted(len(cluster.nodes), 'node')}",
        "links": "; ".join([report.links or "not needed for the choice", *report.checks]),
        "tuning": report.tuning,
    }
    if report.overlap:
        facts["overlap"] = report.overlap
    if rates := cluster.rates:
        facts["rates"] = f"{rate_text(min(rates))} to {rate_text(max(rates))}"
        if report.rates_fault:
            facts["rates"] += f", {report.rates_fault}"
    return facts
