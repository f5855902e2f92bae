"""``autosync tune`` with its report at the end, and ``autosync report`` for runs that are there."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from pydantic import Field, model_validator

from lightning_autosync.bench.validation.hosts import shared_hosts
from lightning_autosync.documents import Configuration, write_text
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.report.compare import compare_timelines
from lightning_autosync.report.tuning.comparison import find_runs, write_comparison
from lightning_autosync.report.tuning.page import REPORT, write_report
from lightning_autosync.report.tuning.rows import summary_row
from lightning_autosync.report.tuning.run import TuningRun
from lightning_autosync.search.tuning import command
from lightning_autosync.search.tuning.result import Outcome
from lightning_autosync.workers import WorkerPool

FORMAT = "autosync-report/1"
_WITHOUT_COMPUTE = ("flat", "paced")
_log = logging.getLogger(__name__)


class ReportSettings(Configuration):
    """What is reported.

    Attributes:
        run: directory of one tuning run; or
        runs: of several, or of directories that hold some, as a sweep's; they are compared.
        file: of the report; None is ``report.html`` in the directory of ``run``, or of ``runs`` if that is one.
    """

    run: str | None = None
    runs: str | tuple[str, ...] | None = Field(default=None)
    file: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ReportSettings:
        if (self.run is None) == (not self.runs):
            raise ValueError("run: give either run=DIR, or runs=DIR or runs=[DIR,DIR,...] to compare several")
        return self


def tune(configuration: dict[str, Any], directory: Path) -> Outcome:
    """Search as `lightning_autosync.search.tuning.command.tune`, then write ``report.html`` beside its files.

    Where computation goes by the clock on links whose rates are known, a step of the best plan is traced on the workers
    and drawn beside the predicted one (``timeline.svg``, ``timeline.png``, ``trace.json``, ``timelines.json``).

    Raises:
        AutoSyncError: a setting is wrong, workers cannot be started, or too many trials failed.
        UnfinishedError: the same after some trials came to a time; the report tells of these.
        Interrupted: by a Ctrl-C; the report tells of what was found until then.
    """
    try:
        outcome = command.tune(configuration, directory)
    except command.Interrupted as ended:
        if ended.outcome is not None:
            _report(directory, ended.outcome)
        raise
    except command.UnfinishedError as ended:
        _report(directory, ended.outcome)
        raise
    try:
        _trace(outcome, directory)
    except AutoSyncError as error:
        _log.warning("no timeline was measured: %s", error)
    _report(directory, outcome)
    return outcome


def _report(directory: Path, outcome: Outcome) -> None:
    storage = outcome.storage if "://" in outcome.storage else None
    write_report(replace(TuningRun.load(directory), storage=storage), directory / REPORT)
    print(directory / REPORT)


def report(configuration: dict[str, Any], directory: Path) -> None:
    """Write the report of one tuning run, or one that compares several; ``result.json`` in ``directory`` sums it up.

    Raises:
        DocumentError: (or a subclass) a setting is wrong, or a run is missing, cut off or of another format.
    """
    settings = ReportSettings.parse(configuration)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if settings.run is not None:
        runs = [TuningRun.load(Path(settings.run))]
        path = Path(settings.file) if settings.file else Path(settings.run) / REPORT
        write_report(runs[0], path)
    else:
        given = [Path(one) for one in ((settings.runs,) if isinstance(settings.runs, str) else settings.runs or ())]
        runs = find_runs(given)
        path = Path(settings.file) if settings.file else (given[0] if len(given) == 1 else directory) / REPORT
        write_comparison(runs, path)
    rows = [summary_row(run) for run in runs]
    write_text(directory / "result.json", json.dumps({"format": FORMAT, "report": str(path), "runs": rows}) + "\n")
    print(path)


def _trace(outcome: Outcome, directory: Path) -> None:
    """Measure a step of the best plan and draw it beside the predicted one, where that can be done."""
    job, best = outcome.job, outcome.best
    settings = job.settings
    if best is None or not job.cluster.measured or settings.model.kind not in _WITHOUT_COMPUTE or settings.within_job:
        return
    scheduling = None if settings.scheduling == "none" else settings.scheduling
    with (
        settings.launch.open(job.cluster) as launch,
        WorkerPool(job.cluster.world_size, launch, timeout=settings.timeout, scheduling=scheduling) as pool,
    ):
        constants = shared_hosts(settings.constants)
        compare_timelines(best.plan, job.workload, job.cluster, pool, directory, constants)
