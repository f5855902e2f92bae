"""The importance of the space's parameters for good plans: Optuna's PED-ANOVA on the study of a run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.search.tuning.result import StudyAddress

if TYPE_CHECKING:
    import optuna

MIN_TRIALS = 25
"""Smallest number of complete trials for an evaluation."""
_MIN_GOOD = 5
_QUANTILE, _MAX_QUANTILE = 0.1, 0.25
_MAX_SHOWN = 14


@dataclass(frozen=True)
class Importance:
    """The importance of parameters.

    Attributes:
        shares: importance by parameter, the largest first; the sum is 1.
        trials: number of evaluated trials: complete ones without builders and refined plans.
        quantile: share of the trials that counts as good.
    """

    shares: dict[str, float]
    trials: int
    quantile: float

    @property
    def shown(self) -> list[tuple[str, float]]:
        """The most important parameters, as many as a picture shows; those without importance are left out."""
        return [(name, share) for name, share in self.shares.items() if share > 0.001][:_MAX_SHOWN]


def importance_of(address: StudyAddress, directory: Path, storage: str | None = None) -> Importance | str:
    """The importance of a study's parameters (Watanabe et al., PED-ANOVA, IJCAI 2023), or the reason why it is unknown.

    Trials of builders and of refined plans are left out, because their parameters do not determine the plan. Of the
    other complete trials a tenth counts as good, but at least five and at most a quarter.

    Args:
        address: address of the study; a relative path of a journal is also searched in ``directory``.
        directory: directory of the tuning run.
        storage: storage that replaces the address's, which has no password.
    """
    from lightning_autosync.search.studies import load_study

    try:
        whole = load_study(storage or _journal(address.storage, directory), address.name)
    except AutoSyncError as error:
        return str(error)
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    study = _of_points(whole)
    complete = len(study.get_trials(deepcopy=False))
    if complete < MIN_TRIALS:
        return f"{complete} complete trials are too few for importances; at least {MIN_TRIALS} are needed."
    quantile = min(_MAX_QUANTILE, max(_QUANTILE, _MIN_GOOD / complete))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator warns that it is experimental
        evaluator = PedAnovaImportanceEvaluator(target_quantile=quantile)
        shares = get_param_importances(study, evaluator=evaluator)
    if not sum(shares.values()) > 0:
        return f"In the {complete} complete trials no parameter mattered more than another."
    return Importance(dict(sorted(shares.items(), key=lambda item: -item[1])), complete, quantile)


def _of_points(whole: optuna.Study) -> optuna.Study:
    """The complete trials whose parameters determine their plans, with corrected times."""
    import optuna
    from optuna.trial import TrialState

    from lightning_autosync.plan.space import BUILDER
    from lightning_autosync.search.studies import distributions, drift_correction, space_of
    from lightning_autosync.search.trial_attributes import RUN, attribute, is_composed, seconds_of

    correction, study = drift_correction(whole), optuna.create_study()
    points = [trial for trial in whole.get_trials(states=(TrialState.COMPLETE,)) if is_composed(trial)]
    space = space_of(whole) if any(BUILDER in trial.params for trial in points) else None
    for trial in points:
        if (seconds := seconds_of(trial)) is not None:
            trial.value = correction.convert(attribute(trial, RUN), trial.number, seconds)
            if space is not None and BUILDER in trial.params:  # Optuna evaluates only parameters of all trials
                trial.params, trial.distributions = space.complete(trial.params), dict(distributions(space))
            study.add_trial(trial)
    return study


def _journal(storage: str, directory: Path) -> str:
    """The storage as it can be opened here: a journal may have moved together with its run."""
    if "://" in storage:
        return storage
    places = (directory / storage, directory / Path(storage).name)
    return str(next((place for place in places if place.is_file()), storage))
