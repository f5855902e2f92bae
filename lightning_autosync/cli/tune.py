"""``autosync tune``: search for the fastest plan by live trials, then write the report."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.report.compare import compare_timelines
from lightning_autosync.report.page import REPORT, write_report
from lightning_autosync.report.tuning_run import TuningRun
from lightning_autosync.search.tuning import command
from lightning_autosync.search.tuning.result import Outcome

_WITHOUT_COMPUTE = ("flat", "paced")
_log = logging.getLogger(__name__)


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
        constants = emulated_hosts(settings.constants)
        compare_timelines(best.plan, job.workload, job.cluster, pool, directory, constants)
