"""``autosync tune``: search for the fastest plan by live trials; write the plan, the study, the result and a report."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.documents import as_yaml, held
from lightning_autosync.errors import AutoSyncError, TuningError, UnwritableError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.interrupts import STATUS
from lightning_autosync.measure.launches.launch import require_torchrun
from lightning_autosync.measure.timelines import measure_timeline
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.measure.workers.job_pool import serve
from lightning_autosync.plan import SyncPlan
from lightning_autosync.report.hybrid import write_hybrid_report
from lightning_autosync.report.page import REPORT, write_report
from lightning_autosync.report.timeline import compare_timelines
from lightning_autosync.report.tuning_run import TuningRun as ReportedRun
from lightning_autosync.search.hybrid.run import HybridTuningOutcome, HybridTuningRun
from lightning_autosync.search.tuning.result import RESULT
from lightning_autosync.search.tuning.run import TuningOutcome, TuningRun
from lightning_autosync.search.tuning.settings import TuningSettings

Outcome = TuningOutcome | HybridTuningOutcome
PLAN, WORKLOAD, CLUSTER = "plan.yaml", "workload.yaml", "cluster.yaml"
_log = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """A Ctrl-C ended the run; the results so far are written."""

    def __init__(self) -> None:
        super().__init__(STATUS)


def tune(configuration: dict[str, Any], directory: Path) -> Outcome:
    """Run the search; with ``parallel=hybrid`` a search of plans that may split operators.

    It writes ``plan.yaml``, ``workload.yaml`` and ``cluster.yaml`` (for ``autosync predict``), ``result.json``, the
    finalists' plans, the study and ``report.html`` to ``directory``. If the model is paced and the rates of the links
    are known, a step of the best plan is traced on the workers and drawn beside the predicted step (``timeline.svg``,
    ``timeline.png``, ``trace.json``, ``timelines.json``). The same command with the same directory resumes an earlier
    run. Within a job all ranks call this; only rank 0 returns, and the others exit.

    Raises:
        AutoSyncError: a setting is wrong, workers cannot be started, or too many trials failed.
        UnwritableError: a file cannot be written; the best plan is printed, and the message says where it is.
        TuningError: the run could not continue; all files were written for the trials that have a time.
        Interrupted: a Ctrl-C ended the run; all files were written for the results so far.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the progress bar already shows every trial
    settings = TuningSettings.parse(configuration)
    if settings.within_job:
        require_torchrun("tune")
        if os.environ["RANK"] != "0":
            serve(settings.timeout, settings.scheduling == "batch")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with _locked(directory):
        outcome = _run(settings, directory, console)
        interrupted = outcome.result.interrupted
        if isinstance(outcome, TuningOutcome) and not interrupted and outcome.result.failure is None:
            try:
                _trace(outcome, directory)
            except AutoSyncError as error:
                _log.warning("could not measure a timeline: %s", error)
            except KeyboardInterrupt:
                interrupted = True
        if interrupted:
            console.print(_how_to_resume(directory, "interrupted"))
        _report(outcome, directory)
    if isinstance(outcome.plan, HybridPlan):
        console.print(outcome.plan.describe(), end="")
    print(directory / REPORT)
    for line in next_steps(directory, outcome.plan):
        console.print(line)
    if interrupted:
        raise Interrupted
    if outcome.result.failure is not None:
        raise TuningError(f"{outcome.result.failure}; the results so far are saved")
    return outcome


def next_steps(directory: Path, plan: SyncPlan | HybridPlan | None) -> list[str]:
    """How to train with a found plan, and how to predict a step with it, for a run directory; empty without a plan."""
    if plan is None:
        return []
    files = {"plan": directory / PLAN, "cluster": directory / CLUSTER}
    given = ", ".join(f"{key}={str(path)!r}" for key, path in files.items())
    train = "to train this model with the plan: Trainer(strategy={}({}), ...)"
    if isinstance(plan, HybridPlan):
        return [train.format("AutoDDLStrategy", given)]
    if plan.semantics != "exact":
        given += f", semantics={plan.semantics!r}"
    words = [f"{key}={shlex.quote(str(path))}" for key, path in {**files, "workload": directory / WORKLOAD}.items()]
    return [
        train.format("AutoSyncStrategy", given),
        f"to predict a step with it and draw that: autosync predict {' '.join(words)}",
    ]


def _run(settings: TuningSettings, directory: Path, console: Console) -> Outcome:
    """Search, print the result and write it."""
    kind = HybridTuningRun if settings.parallel.kind == "hybrid" else TuningRun
    with ExitStack() as saving:
        try:
            with ShownProgress("tune") as report:
                outcome = kind(settings, directory, saving, report).run()
        except KeyboardInterrupt:
            console.print(_how_to_resume(directory, "interrupted before the first result"))
            raise Interrupted from None
        if outcome.result.interrupted and outcome.result.is_empty:
            console.print(_how_to_resume(directory, "interrupted before the first result"))
            raise Interrupted
        for line in outcome.result.lines():
            console.print(line)
        try:
            console.print(", ".join(str(directory / name) for name in _write(outcome, directory)))
        except UnwritableError as error:
            raise _keep_elsewhere(outcome, error, console) from None
    return outcome


def _locked(directory: Path) -> AbstractContextManager[None]:
    """Hold the directory within the block; raises `TuningError` if another process holds it."""
    return held(
        directory / ".tune.lock",
        TuningError(f"{directory}: another process uses this run directory; wait until it ends"),
    )


def _write(outcome: Outcome, directory: Path) -> list[str]:
    """Write the files, the most important first in case one fails; returns the names of the main files."""
    plan = outcome.plan
    if plan is not None:
        plan.save(directory / PLAN)
    outcome.result.write(directory)
    if plan is None:
        return [RESULT]
    outcome.job.workload.save(directory / WORKLOAD)
    outcome.job.cluster.save(directory / CLUSTER)
    return [PLAN, RESULT]


def _keep_elsewhere(outcome: Outcome, error: UnwritableError, console: Console) -> UnwritableError:
    """Print the best plan and write the files to a temporary folder; returns an error that names the folder."""
    if outcome.plan is None:
        return error
    console.print(as_yaml(outcome.plan.to_dict()))
    try:
        folder = Path(tempfile.mkdtemp(prefix="autosync-tune-"))
        _write(outcome, folder)
    except OSError as again:  # UnwritableError is one
        return UnwritableError(f"{error}; the best plan is printed above, but could not be saved ({again})")
    return UnwritableError(f"{error}; the best plan is printed above and saved as {folder / PLAN}")


def _how_to_resume(directory: Path, what: str) -> str:
    """A message with the override that resumes the run with the same command; in a sweep, the whole sweep."""
    override = f"hydra.run.dir={shlex.quote(str(directory))}"
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        override = f"hydra.sweep.dir={shlex.quote(str(HydraConfig.get().sweep.dir))}"
    return f"{what}; to resume, run the same command with {override}"


def _report(outcome: Outcome, directory: Path) -> None:
    if isinstance(outcome, HybridTuningOutcome):
        write_hybrid_report(outcome.result, directory / REPORT)
        return
    storage = outcome.storage if "://" in outcome.storage else None
    write_report(replace(ReportedRun.load(directory), storage=storage), directory / REPORT)


def _trace(outcome: TuningOutcome, directory: Path) -> None:
    """Measure a step of the best plan and draw it beside the predicted step, if that is possible."""
    job, plan, settings = outcome.job, outcome.plan, outcome.job.settings
    if plan is None or not job.cluster.measured or not settings.is_paced or settings.within_job:
        return
    scheduling = None if settings.scheduling == "none" else settings.scheduling
    with (
        settings.launch.open(job.cluster) as launch,
        WorkerPool(job.cluster.world_size, launch, timeout=settings.timeout, scheduling=scheduling) as pool,
    ):
        measured = measure_timeline(plan, job.workload, job.cluster, pool)
    compare_timelines(measured, plan, job.workload, job.cluster, directory, outcome.constants)
