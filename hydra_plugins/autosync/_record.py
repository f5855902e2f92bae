"""``result.json`` of a sweep: every trial so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hydra_plugins.autosync._space import Space
from hydra_plugins.autosync._study import of_sweep
from lightning_autosync.documents import write_text

FORMAT = "autosync-sweep/1"


def write_record(study: optuna.Study, space: Space, directory: Path, compares: bool) -> None:
    """Write the file anew: the space, each trial, and, if trials are compared, the best of them."""
    trials = of_sweep(study)
    begun = [trial for trial in trials if trial.state is not TrialState.WAITING]
    complete = any(trial.state is TrialState.COMPLETE for trial in trials)
    record = {
        "format": FORMAT,
        "study": study.study_name,
        "space": space.to_dict(),
        "directions": [direction.name.lower() for direction in study.directions] if compares else None,
        "best": [_entry(trial, compares) for trial in study.best_trials] if compares and complete else None,
        "waiting": len(trials) - len(begun),
        "trials": [_entry(trial, compares) for trial in begun],
    }
    write_text(directory / "result.json", json.dumps(record) + "\n")


def _entry(trial: FrozenTrial, compares: bool) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "params": trial.params,
        "values": trial.values if compares else None,
        "seconds": trial.user_attrs.get("seconds"),
        "error": trial.user_attrs.get("error"),
    }
