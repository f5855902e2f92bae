"""``autosync tune``: search for the fastest plan by live trials; leave the plan, the study and ``result.json``."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from lightning_autosync.documents import as_yaml, held, write_text
from lightning_autosync.errors import UnwritableError
from lightning_autosync.interrupts import STATUS
from lightning_autosync.measure.workers.job_pool import require_job, serve
from lightning_autosync.search.tuning.errors import TuningError
from lightning_autosync.search.tuning.result import Outcome
from lightning_autosync.search.tuning.run import Run
from lightning_autosync.search.tuning.settings import Settings

PLAN, WORKLOAD, CLUSTER = "plan.yaml", "workload.yaml", "cluster.yaml"
RESULT = "result.json"
_LOCK = ".tune.lock"


class Interrupted(SystemExit):
    """Somebody ended the run with a Ctrl-C; what was found until then is written.

    Attributes:
        outcome: what that is; None if there was nothing to write.
    """

    def __init__(self, outcome: Outcome | None) -> None:
        super().__init__(STATUS)
        self.outcome = outcome


class UnfinishedError(TuningError):
    """A run could not go on; what was found until then is written.

    Attributes:
        outcome: what that is.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.failure}; what was found until then is written")
        self.outcome = outcome


def tune(configuration: dict[str, Any], directory: Path) -> Outcome:
    """Run the search; ``plan.yaml``, ``result.json``, the finalists' plans and the study appear in ``directory``.

    The same command with the same directory goes on where an earlier one ended. Within a job all ranks call this; only
    rank 0 returns, and the others end.

    Raises:
        AutoSyncError: a setting is wrong, workers cannot be started, or too many trials failed.
        UnwritableError: a file cannot be written; the best plan was printed, and its place elsewhere is in the message.
        UnfinishedError: the same, after all files were written for the trials that came to a time.
        Interrupted: by a Ctrl-C, after all files were written for what was found until then.
    """
    _quiet_optuna()
    settings = Settings.parse(configuration)
    if settings.within_job:
        require_job()
        if os.environ["RANK"] != "0":
            serve(settings.timeout, settings.scheduling == "batch")
    console = Console()
    refusal = TuningError(f"{directory}: another process is at work on this run; let it end first")
    with held(directory / _LOCK, refusal), ExitStack() as saving:
        try:
            outcome = Run(settings, directory, saving).run()
        except KeyboardInterrupt:
            raise _interrupted(None, directory, console) from None
        if outcome.interrupted and all(record.interrupted for record in outcome.records):
            raise _interrupted(None, directory, console)
        try:
            _write(outcome, directory, console)
        except UnwritableError as error:
            raise _kept_elsewhere(outcome, error, console) from None
    if outcome.interrupted:
        raise _interrupted(outcome, directory, console)
    if outcome.failure is not None:
        raise UnfinishedError(outcome)
    return outcome


def _write(outcome: Outcome, directory: Path, console: Console) -> None:
    """The files, and what they say in short; the workload and the cluster are there for `autosync predict`."""
    for line in outcome.lines():
        console.print(line, soft_wrap=True, highlight=False)
    files = _files(outcome, directory)
    console.print(", ".join(str(directory / name) for name in files), soft_wrap=True, highlight=False)


def _files(outcome: Outcome, directory: Path) -> list[str]:
    """Write them, first what matters most; their names."""
    files = [RESULT]
    if outcome.best is not None:
        outcome.best.plan.save(directory / PLAN)
        files.insert(0, PLAN)
    write_text(directory / RESULT, json.dumps(outcome.to_dict()) + "\n")
    if outcome.best is not None:
        outcome.job.workload.save(directory / WORKLOAD)
        outcome.job.cluster.save(directory / CLUSTER)
    return files


def _kept_elsewhere(outcome: Outcome, error: UnwritableError, console: Console) -> UnwritableError:
    """Print the best plan, and write the files to the folder for temporary ones; an error that says where they are."""
    if outcome.best is None:
        return error
    console.print(as_yaml(outcome.best.plan.to_dict()), soft_wrap=True, highlight=False, markup=False)
    try:
        folder = Path(tempfile.mkdtemp(prefix="autosync-tune-"))
        _files(outcome, folder)
    except OSError as again:  # UnwritableError is one
        return UnwritableError(f"{error}; the best plan is printed above, and kept nowhere ({again})")
    return UnwritableError(f"{error}; the best plan is printed above, and kept as {folder / PLAN}")


def _interrupted(outcome: Outcome | None, directory: Path, console: Console) -> Interrupted:
    found = "interrupted before there was anything to write" if outcome is None else "interrupted"
    line = f"{found}; to go on, give the same command with {_again(directory)}"
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    return Interrupted(outcome)


def _again(directory: Path) -> str:
    """The override by which the same command goes on; within a sweep that is one of the whole sweep."""
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        return f"hydra.sweep.dir={shlex.quote(str(HydraConfig.get().sweep.dir))}"
    return f"hydra.run.dir={shlex.quote(str(directory))}"


def _quiet_optuna() -> None:
    """Every trial is a line of the progress already."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
