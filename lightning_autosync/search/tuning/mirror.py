"""Optuna's samplers, so that nothing is kept from them that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightning_autosync.measure.drift import DriftCorrection
from lightning_autosync.search.trial_attributes import RUN, attribute, is_composed, seconds_of, sight_of


class MirrorSampler(BaseSampler):
    """A sampler of Optuna that learns from a mirror of the study.

    Some of them learn from complete trials only, and all would take what a builder's plan took for the time of the
    composed plan of the same parameters. In the mirror, trials that were given up as slow are complete ones, seconds
    are on one footing, and those are left out whose parameters do not tell what was measured.

    Args:
        base: the sampler.
        distributions: of all parameters of the study.
        fixed: values of those that it does not choose.
    """

    def __init__(
        self, base: BaseSampler, distributions: Mapping[str, BaseDistribution], fixed: Mapping[str, Any]
    ) -> None:
        self._base = base
        self._distributions = dict(distributions)
        self._fixed = dict(fixed)
        self._free = {name: found for name, found in distributions.items() if name not in fixed}

    def reseed_rng(self) -> None:
        self._base.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        mirror = optuna.create_study(sampler=self._base)
        mirror.add_trials(self._mirrored(study, trial))
        return {**mirror.ask(self._free).params, **self._fixed}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._base.sample_independent(study, trial, param_name, param_distribution)

    def _mirrored(self, study: optuna.Study, own: FrozenTrial) -> Iterator[FrozenTrial]:
        trials = study.get_trials(deepcopy=False)
        footing = DriftCorrection.of(map(sight_of, trials), own.user_attrs.get(RUN))
        for trial in trials:
            if trial.number == own.number or not is_composed(trial) or not self._free.keys() <= trial.params.keys():
                continue
            point: dict[str, Any] = {
                "params": {name: trial.params[name] for name in self._free},
                "distributions": self._free,
            }
            if trial.state == TrialState.RUNNING:
                yield create_trial(state=TrialState.RUNNING, **point)
            elif (seconds := seconds_of(trial)) is not None:
                yield create_trial(value=footing.convert(attribute(trial, RUN), trial.number, seconds), **point)
