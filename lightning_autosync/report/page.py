"""The report of one tuning run, as a single self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autosync.documents import Record, as_yaml, bytes_text, checked, counted, write_text
from lightning_autosync.errors import PlanError
from lightning_autosync.measure.hosts import job_hosts
from lightning_autosync.replay import Constants, Timeline
from lightning_autosync.replay.constants import Cores
from lightning_autosync.report.figures.cluster import cluster_picture
from lightning_autosync.report.figures.picture import Picture
from lightning_autosync.report.figures.plan import plan_picture
from lightning_autosync.report.figures.tuning import (
    KINDS,
    contenders_picture,
    hit_rate,
    importance_picture,
    kendall,
    predictions_picture,
    tuning_curve,
)
from lightning_autosync.report.importance import Importance, importance_of
from lightning_autosync.report.plan_view import PlanView, message_rows
from lightning_autosync.report.rendering import milliseconds, rate_text, render
from lightning_autosync.report.summary import bound_share, summary
from lightning_autosync.report.timeline import TIMELINES, load_timelines, steps_picture
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.search.tuning.comparison import FinalComparison
from lightning_autosync.search.tuning.records import LENIENT
from lightning_autosync.search.tuning.result import RESULT, sampler_text
from lightning_autosync.search.tuning.settings import PACED

REPORT = "report.html"


@dataclass(frozen=True)
class Headline:
    """One of the large numbers at the top of the page."""

    value: str
    what: str
    detail: str = ""


def write_report(run: TuningRun, path: Path) -> None:
    """Write the report of a run to an HTML file.

    Raises:
        DocumentError: a file of the run is wrong (the error may be of a subclass).
    """
    write_text(path, render("tuning.html", **_page(run)))


def _page(run: TuningRun) -> dict[str, Any]:
    view = _view(run)
    timelines = _timelines(run, view)
    importance = _importance(run)
    return {
        "run": run,
        "title": f"Tuning report: {run.title}",
        "headlines": list(_headlines(run)),
        "summary": summary(run),
        "kendall": kendall(run),
        "has_bound": run.bound is not None,
        "messages": [] if view is None else list(message_rows(view)),
        "plan_text": None if run.plan is None else as_yaml(run.plan.to_dict(), width=100),
        "timelines": timelines,
        "importance": importance,
        "pictures": _pictures(run, view, timelines, importance),
        "final_rows": _final_rows(run),
        "facts": _facts(run),
        "settings_text": as_yaml(run.result.settings, width=100),
        "environment": _flat(run.result.environment),
    }


def _pictures(
    run: TuningRun, view: PlanView | None, timelines: dict[str, Timeline], importance: Importance | str | None
) -> dict[str, Picture]:
    """The pictures by name, without those that cannot be made."""
    made = [tuning_curve(run), hit_rate(run), predictions_picture(run)]
    if view is not None:
        made.append(plan_picture(view.plan, view.schedule, run.workload))
        made.append(None if view.traffic is None else cluster_picture(run.cluster, view.traffic))
    if run.final is not None:
        made.append(contenders_picture(run.final, None if run.bound is None else run.bound.seconds))
    if timelines:
        made.append(steps_picture(timelines))
    if isinstance(importance, Importance):
        made.append(importance_picture(importance))
    return {picture.name: picture for picture in made if picture is not None}


def _headlines(run: TuningRun) -> Iterator[Headline]:
    if run.result.best is None:
        return
    yield Headline(milliseconds(run.best_seconds), "a step with the best plan")
    if run.final is not None:
        yield _ratio(run.final, run.final.ddp, "best-tuned DDP")
        if run.final.builder is not None:
            yield _ratio(run.final, run.final.builder, "best builder")
    if (share := bound_share(run)) is not None:
        yield Headline(f"{share:.0%}", "of the speed bound of exact plans")
    if run.hit_rate is not None:
        yield Headline(f"{run.hits} of {len(run.proposals)}", "proposals beat the best builder")


def _ratio(final: FinalComparison, opponent: str, what: str) -> Headline:
    ratio = final.speedup(opponent)
    if opponent == final.winner:
        return Headline("1.00x", f"the {what} is the best plan")
    return Headline(f"{ratio.median:.2f}x", f"as fast as the {what}", f"{ratio.low:.2f} to {ratio.high:.2f}")


def _timelines(run: TuningRun, view: PlanView | None) -> dict[str, Timeline]:
    """The timelines that the run wrote; otherwise the predicted one, if there is a prediction."""
    path = run.directory / TIMELINES
    if path.is_file():
        return load_timelines(path)
    return {} if view is None or view.prediction is None else {"predicted": view.prediction.timeline}


def _importance(run: TuningRun) -> Importance | str:
    if run.result.study is None:
        return "The run names no study."
    return importance_of(run.result.study, run.directory, run.storage)


def _final_rows(run: TuningRun) -> list[dict[str, str]]:
    if run.final is None:
        return []
    return [
        {
            "name": name,
            "kind": KINDS[one.kind][2],
            "exactness": one.exactness,
            "median": f"{1e3 * one.median:.2f}",
            "spread": f"{1e3 * min(one.rounds):.2f} to {1e3 * max(one.rounds):.2f}",
            "speedup": f"{speedup.median:.3f}x",
            "interval": f"{speedup.low:.3f} to {speedup.high:.3f}",
            "bound": "" if run.bound is None or one.exactness != "exact" else f"{run.bound.seconds / one.median:.0%}",
        }
        for name, one, speedup in run.final.compared()
    ]


def _facts(run: TuningRun) -> dict[str, str]:
    """Facts about what was tuned and how long that took."""
    workload, cluster, timing = run.workload, run.cluster, run.result.timing
    parameters, nodes = counted(len(workload.variables), "parameter"), counted(len(cluster.nodes), "node")
    facts = {
        "model": f"{workload.name}: {parameters}, {bytes_text(workload.bytes)} of gradients",
        "compute": f"forward {milliseconds(workload.forward_time)}, backward {milliseconds(workload.backward_time)}",
        "cluster": f"{cluster.name}: {cluster.world_size} ranks on {nodes}{_rates(run)}",
        "semantics": run.result.semantics,
        "sampler": run.sampler + ("" if run.seed is None else f", seed {run.seed}"),
    }
    if timing.wall_seconds is not None:
        facts["wall time"] = (
            f"{timing.wall_seconds / 60:.1f} minutes: start of the workers, opponents, search and final comparison; "
            "the start of the command and what follows (timeline, report) are not counted"
        )
    if timing.trials_per_minute is not None:
        facts["pace"] = f"{timing.trials_per_minute:.1f} trials a minute"
    if timing.sampler_seconds_by_proposal:
        facts["sampler overhead"] = sampler_text(timing.sampler_seconds_by_proposal)
    elif timing.sampler_seconds is not None:
        facts["sampler overhead"] = f"{timing.sampler_seconds:.1f} s in all"
    if run.result.study is not None:
        facts["study"] = f"{run.result.study.name} in {run.result.study.storage}"
    return facts


def _rates(run: TuningRun) -> str:
    if not (rates := run.cluster.rates):
        return ""
    least, most = rate_text(min(rates)), rate_text(max(rates))
    return f", links of {least}" + ("" if least == most else f" to {most}")


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as one mapping with dotted keys and texts."""
    made: dict[str, str] = {}
    for key, value in data.items():
        made |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": _said(value)}
    return made


def _said(value: Any) -> str:
    match value:
        case list():
            return ", ".join(map(_said, value))
        case dict():
            return " ".join(f"{key}={_said(one)}" for key, one in value.items())
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
    return str(value)


def _view(run: TuningRun) -> PlanView | None:
    """The view of a run's best plan; None if there is none.

    Raises:
        PlanError: the plan is not for the run's workload and cluster.
    """
    if run.plan is None:
        return None
    try:
        return PlanView.of(run.plan, run.workload, run.cluster, _constants(run))
    except PlanError as error:
        raise PlanError(f"{run.directory / RESULT}: best.{error}") from None


def _constants(run: TuningRun) -> Constants:
    """The constants with which the run predicted; in earlier versions, those of its settings and number of cores.

    Raises:
        DocumentError: they are wrong, or the file of constants of an earlier version's run no longer exists.
    """
    if run.result.constants is not None:
        return Constants.from_dict(run.result.constants, source=f"{run.directory / RESULT}: constants")
    told = {**run.result.settings, "cores": run.result.environment.get("cores")}
    hosts = checked(_Hosts, told, str(run.directory / RESULT))
    launch = "torchrun" if hosts.within_job else hosts.launch.kind
    return job_hosts(launch, run.paced or hosts.model.kind in PACED, hosts.constants, hosts.cores)


class _Kind(Record):
    """The kind of a run's launch or model; empty if it is not recorded."""

    model_config = LENIENT

    kind: str = ""


class _Hosts(Record):
    """What a run recorded about its hosts, among its settings."""

    model_config = LENIENT

    constants: str | None = None
    within_job: bool = False
    launch: _Kind = _Kind()
    model: _Kind = _Kind()
    cores: Cores | None
