"""The Optuna study of a sweep, its trials, and ``result.json``, which records them."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_plugins.autosync._config import SweepError
from hydra_plugins.autosync._space import Parameter, Space
from lightning_autosync import documents
from lightning_autosync.documents import shown, write_text
from lightning_autosync.search import storages

Direction = Literal["minimize", "maximize"]

FORMAT = "autosync-sweep/1"
JOURNAL = "study.journal"
SPACE_KEY = "autosync:sweep"
"""Attribute of the study: the space of the sweep."""
PLACE_KEY = "autosync:sweep_directory"
"""Attribute of a trial: the directory of the sweep that runs it."""
SURPLUS_KEY = "autosync:surplus"
"""Attribute of a trial that does not count: sweeps that share a study may both have asked for a combination."""
FIXED = "fixed_params"
"""Where Optuna keeps the values of a trial that was enqueued."""
SECONDS = "seconds of the launch"
"""Name of the values where nothing is compared, for readers of the study."""


def held(directory: Path) -> AbstractContextManager[None]:
    """Keep other sweeps out of the directory within the block; the lock ends with this process.

    Raises:
        SweepError: another sweep is under way there.
    """
    refusal = SweepError(f"{directory}: another sweep uses this directory; wait until it ends")
    return documents.held(directory / ".sweep.lock", refusal)


def open_storage(url: str | None, directory: Path) -> BaseStorage:
    """The database of the URL, or a journal in the directory.

    Raises:
        SweepError: it cannot be opened.
    """
    try:
        return storages.open_storage(url or directory / JOURNAL)
    except storages.StudyError as error:
        raise SweepError(f"hydra.sweeper.storage: {error}") from None


def open_study(
    name: str, storage: BaseStorage, space: Space, directions: Sequence[Direction], sampler: Any
) -> optuna.Study:
    """The study of that name, made if there is none.

    Raises:
        SweepError: there is one with another space.
    """
    study = optuna.create_study(
        study_name=name, storage=storage, sampler=sampler, directions=list(directions), load_if_exists=True
    )
    here = {**space.to_dict(), "directions": list(directions)}
    found = study.user_attrs.get(SPACE_KEY)
    there = found if isinstance(found, dict) else {}
    if found is None and not study.trials:
        study.set_user_attr(SPACE_KEY, here)
    elif json.loads(json.dumps(here)) != there:
        raise SweepError(
            f"study '{name}': it has another search space ({_difference(there, here)}); "
            "choose another hydra.sweep.dir, or give the same keys to resume it"
        )
    return study


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    part = next((part for part in ("directions", "fixed", "parameters") if there.get(part) != here[part]), None)
    if part is None:
        return f"recorded: {shown(there)}"
    return f"{part}: recorded {shown(there.get(part))}, now {json.dumps(here[part])}"


def hold_to_metric(study: optuna.Study, compares: bool, metrics: Sequence[str] = ()) -> None:
    """Check that values of the study are of one kind: what jobs return, or how long they took, if nothing is compared.

    Args:
        study: the study.
        compares: whether the values are what jobs return.
        metrics: their names in this case, one for each direction; empty leaves them without names.

    Raises:
        SweepError: the study's trials have the other kind.
    """
    if study.trials and compares == (study.metric_names == [SECONDS]):
        there, here = ("without", "with") if compares else ("with", "without")
        raise SweepError(
            f"study '{study.study_name}': its trials ran {there} hydra.sweeper.direction, but this sweep runs {here} "
            "it; choose another hydra.sweep.dir"
        )
    if not compares:
        storages.name_metrics(study, [SECONDS])
    elif metrics:
        storages.name_metrics(study, metrics)


def enqueue_grid(study: optuna.Study, space: Space) -> int:
    """Enqueue every combination that the study does not have yet; returns the number of trials after that.

    The study may have some because enqueueing was interrupted, or because a sampler chose them.
    """
    trials = of_sweep(study)
    # Optuna's own `skip_if_exists` takes numbers for equal that differ by a hundred thousandth.
    had = {_values(_given(trial), space) for trial in trials}
    missing = [combination for combination in space.grid() if _values(combination, space) not in had]
    for combination in missing:
        study.enqueue_trial(combination)
    return len(trials) + len(missing)


def of_sweep(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study that count."""
    return [trial for trial in study.get_trials(deepcopy=False) if SURPLUS_KEY not in trial.user_attrs]


def _given(trial: FrozenTrial) -> Mapping[str, Any]:
    """The values that a trial was enqueued with, or else its parameters."""
    found = trial.system_attrs.get(FIXED)
    return found if found and isinstance(found, dict) else trial.params


def _values(values: Mapping[str, Any], space: Space) -> tuple[Any, ...]:
    found = [values.get(parameter.name) for parameter in space.parameters]
    return tuple(value if isinstance(value, Hashable) else shown(value) for value in found)


def interrupted(study: optuna.Study, directory: Path, own: bool) -> list[Trial]:
    """The trials that this sweep was running when it ended; they are run again.

    Args:
        study: the study.
        directory: the sweep's.
        own: whether nobody else writes to the study, so that every running trial was ours.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    ours = [trial for trial in running if own or trial.user_attrs.get(PLACE_KEY) == _place(directory)]
    for trial in ours:
        if SURPLUS_KEY in trial.user_attrs:  # the sweep ended before it could end the trial
            study.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)
    return [Trial(study, trial._trial_id) for trial in ours if SURPLUS_KEY not in trial.user_attrs]


def ask(study: optuna.Study, directory: Path, grid: Space | None = None) -> Trial | None:
    """The next trial, marked as ours. With a ``grid``, one whose combination no other trial has; None if none is left.

    Sweeps on one study that begin at once find the same combinations missing, and each enqueues all of them. Of equal
    trials the one with the lowest number is run.
    """
    while True:
        trial = study.ask()
        trial.set_user_attr(PLACE_KEY, _place(directory))
        if grid is None or _is_first(study, trial.number, grid):
            return trial
        trial.set_user_attr(SURPLUS_KEY, True)
        study.tell(trial, state=TrialState.PRUNED)
        if not any(other.state is TrialState.WAITING for other in of_sweep(study)):
            return None


def _is_first(study: optuna.Study, number: int, grid: Space) -> bool:
    """Whether a trial was enqueued, and no trial before it has its combination."""
    trials = of_sweep(study)
    own = next(trial for trial in trials if trial.number == number)
    before = {_values(_given(trial), grid) for trial in trials if trial.number < number}
    return FIXED in own.system_attrs and _values(_given(own), grid) not in before


def started(study: optuna.Study) -> int:
    """The number of trials that were begun."""
    return sum(trial.state is not TrialState.WAITING for trial in of_sweep(study))


def suggest(trial: Trial, parameter: Parameter) -> Any:
    """The trial's value of a parameter; an interrupted trial keeps the value that it has."""
    distribution = parameter.distribution
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(parameter.name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(
            parameter.name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(
        parameter.name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
    )


def _place(directory: Path) -> str:
    return documents.identity(directory)


def write_record(study: optuna.Study, space: Space, directory: Path, compares: bool) -> None:
    """Write ``result.json`` anew: the space, each trial, and, if trials are compared, the best of them."""
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
        "figures": trial.user_attrs.get("figures", {}),
        "seconds": trial.user_attrs.get("seconds"),
        "error": trial.user_attrs.get("error"),
    }
