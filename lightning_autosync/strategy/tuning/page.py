"""The HTML page of a job that tunes itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_autosync.documents import counted, write_text
from lightning_autosync.report.figures.cluster import cluster_picture
from lightning_autosync.report.figures.picture import Picture
from lightning_autosync.report.figures.plan import plan_picture
from lightning_autosync.report.plan_view import PlanView, message_rows
from lightning_autosync.report.rendering import milliseconds, rate_text, render, yaml_text
from lightning_autosync.report.timeline import steps_picture
from lightning_autosync.strategy.tuning.report import TrialReport, TuningReport


def write_page(report: TuningReport, path: Path) -> None:
    """Write the report of a job as a single self-contained HTML file.

    Raises:
        UnwritableError: the file cannot be written.
    """
    found = report.resolution
    view = PlanView.of(found.plan, found.workload, found.cluster, report.constants, found.schedule)
    page = render(
        "job.html",
        title=f"Synchronization of {found.workload.name}",
        report=report,
        prediction=view.prediction,
        messages=list(message_rows(view)),
        plan_text=yaml_text(view.plan.to_dict()),
        pictures={picture.name: picture for picture in _pictures(report, view)},
        candidates=list(_candidates(report)),
        trials=[_trial(each) for each in report.trials],
        facts=_facts(report),
    )
    write_text(path, page)


def _pictures(report: TuningReport, view: PlanView) -> Iterator[Picture]:
    yield plan_picture(view.plan, view.schedule, view.workload)
    if view.traffic is not None and view.prediction is not None:
        cluster = cluster_picture(report.resolution.cluster, view.traffic)
        if cluster is not None:
            yield cluster
        yield steps_picture({"predicted": view.prediction.timeline})


def _candidates(report: TuningReport) -> Iterator[dict[str, Any]]:
    """The rows of the table of candidates: plans in the order in which they could be tried."""
    for each in report.resolution.alternatives:
        plan = each.plan.fingerprint
        yield {
            "name": each.name,
            "plan": plan,
            "messages": len(each.plan.groups),
            "predicted": milliseconds(each.predicted),
            "in_use": plan == report.plan,
        }


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
    rates = [rate for link in cluster.links for rate in (link.bandwidth, link.reverse_bandwidth) if rate]
    facts = {
        "model": f"{workload.name}: {counted(len(workload.variables), 'parameter')}, "
        f"{workload.bytes / 1e6:.1f} MB of gradients",
        "cluster": f"{cluster.name}: {counted(cluster.world_size, 'rank')} on {counted(len(cluster.nodes), 'node')}",
        "links": report.links or "not needed for the choice",
        "tuning": report.tuning,
    }
    if rates:
        facts["rates"] = f"{rate_text(min(rates))} to {rate_text(max(rates))}"
    return facts
