"""``autosync tune``: search for the fastest plan by live trials; leave the plan, the study and ``result.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_autosync.documents import write_text
from lightning_autosync.search.tuning.result import Outcome
from lightning_autosync.search.tuning.run import Run
from lightning_autosync.search.tuning.settings import Settings
from lightning_autosync.search.tuning.tuner import TuningError
from lightning_autosync.search.tuning.within_job import require_job, serve

PLAN = "plan.yaml"
RESULT = "result.json"


def tune(configuration: dict[str, Any], directory: Path) -> Outcome:
    """Run the search; ``plan.yaml``, ``result.json``, the finalists' plans and the study appear in ``directory``.

    The same command with the same directory goes on where an earlier one ended. After an interruption all files are
    there, for what was found until then. Within a job all ranks call this; only rank 0 returns, and the others end.

    Raises:
        AutoSyncError: a setting is wrong, workers cannot be started, or too many trials failed.
    """
    _quiet_optuna()
    settings = Settings.parse(configuration)
    if settings.within_job:
        require_job()
        if os.environ["RANK"] != "0":
            serve(settings.timeout, settings.scheduling == "batch")
    try:
        outcome = Run(settings, directory).run()
    except KeyboardInterrupt:
        raise TuningError("interrupted before the first trial; nothing was measured") from None
    files = [RESULT]
    write_text(directory / RESULT, json.dumps(outcome.to_dict()) + "\n")
    if outcome.best is not None:
        outcome.best.plan.save(directory / PLAN)
        files.insert(0, PLAN)
    console = Console()
    for line in outcome.lines():
        console.print(line, soft_wrap=True, highlight=False)
    console.print(", ".join(str(directory / name) for name in files), soft_wrap=True, highlight=False)
    return outcome


def _quiet_optuna() -> None:
    """Every trial is a line of the progress already."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
