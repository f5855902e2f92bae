"""The study behind a sweep: made or found again, and what was under way when the sweep was interrupted."""

from __future__ import annotations

import json
import warnings
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_plugins.autosync._errors import SweepError
from hydra_plugins.autosync._space import Parameter, Space
from lightning_autosync import documents
from lightning_autosync.documents import shown
from lightning_autosync.search import storages

Direction = Literal["minimize", "maximize"]

JOURNAL = "study.journal"
SPACE_KEY = "autosync:sweep"
"""Attribute of the study: what it is over."""
PLACE_KEY = "autosync:sweep_directory"
"""Attribute of a trial: the directory of the sweep that runs it."""
SURPLUS_KEY = "autosync:surplus"
"""Attribute of a trial that is none of the sweep: sweeps that share a study may both have asked for a combination."""
FIXED = "fixed_params"
"""Where Optuna keeps the values of a trial that was enqueued."""
SECONDS = "seconds of the launch"
"""What values are where nothing is compared, told to whoever opens the study."""


def held(directory: Path) -> AbstractContextManager[None]:
    """Keep other sweeps out of the directory; however this process ends, it is free again.

    Raises:
        SweepError: another one is at work there.
    """
    return documents.held(directory / ".sweep.lock", SweepError(f"{directory}: another sweep is under way there"))


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
        SweepError: there is one, over something else.
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
            f"study '{name}': it is over something else ({_difference(there, here)}); "
            "take another hydra.sweep.dir, or start with the same keys to go on with it"
        )
    return study


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    part = next((part for part in ("directions", "fixed", "parameters") if there.get(part) != here[part]), None)
    if part is None:
        return f"it says {shown(there)}"
    return f"{part}: {shown(there.get(part))} there, {json.dumps(here[part])} here"


def hold_to_metric(study: optuna.Study, compares: bool) -> None:
    """Let one study have values of one kind: what jobs return, or, where nothing is compared, how long they took.

    Raises:
        SweepError: the study's trials have the other kind.
    """
    if study.trials and compares == (study.metric_names == [SECONDS]):
        there, here = ("without", "with") if compares else ("with", "without")
        raise SweepError(
            f"study '{study.study_name}': its trials were run {there} hydra.sweeper.direction, this is a sweep {here} "
            "it; take another hydra.sweep.dir"
        )
    if not compares:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([SECONDS])


def enqueue_grid(study: optuna.Study, space: Space) -> int:
    """Let the study ask for every combination that it has not had; returns the number of trials that it has then.

    It may have been interrupted at that, and a sampler may have chosen some of them before.
    """
    trials = of_sweep(study)
    # Not by Optuna's own `skip_if_exists`, to which numbers are the same that differ by a hundred thousandth.
    had = {_values(_given(trial), space) for trial in trials}
    missing = [combination for combination in space.grid() if _values(combination, space) not in had]
    for combination in missing:
        study.enqueue_trial(combination)
    return len(trials) + len(missing)


def of_sweep(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study, but for those that are surplus."""
    return [trial for trial in study.get_trials(deepcopy=False) if SURPLUS_KEY not in trial.user_attrs]


def _given(trial: FrozenTrial) -> Mapping[str, Any]:
    """The values that a trial was enqueued with, or else those that it has come to."""
    found = trial.system_attrs.get(FIXED)
    return found if found and isinstance(found, dict) else trial.params


def _values(values: Mapping[str, Any], space: Space) -> tuple[Any, ...]:
    found = [values.get(parameter.name) for parameter in space.parameters]
    return tuple(value if isinstance(value, Hashable) else shown(value) for value in found)


def interrupted(study: optuna.Study, directory: Path, own: bool) -> list[Trial]:
    """The trials that this sweep was running when it ended, to be run again.

    Args:
        study: the study.
        directory: the sweep's.
        own: whether nobody else writes to the study, so that every trial that seems to run was ours.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    ours = [trial for trial in running if own or trial.user_attrs.get(PLACE_KEY) == _place(directory)]
    for trial in ours:
        if SURPLUS_KEY in trial.user_attrs:  # it ended before it could tell of it
            study.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)
    return [Trial(study, trial._trial_id) for trial in ours if SURPLUS_KEY not in trial.user_attrs]


def ask(study: optuna.Study, directory: Path, grid: Space | None = None) -> Trial | None:
    """The next trial, marked as ours; of a ``grid`` one whose combination no other has, None where there is none left.

    Sweeps on one study that begin at once find the same combinations missing, and each asks for all of them. Of equal
    ones the trial with the lowest number is run.
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
    """Trials that were begun, however they ended."""
    return sum(trial.state is not TrialState.WAITING for trial in of_sweep(study))


def suggest(trial: Trial, parameter: Parameter) -> Any:
    """The trial's value; the one that it has already, if it was interrupted."""
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
