"""Samplers by name, drift correction for Optuna's samplers, and the space of Horovod's autotuning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import digest
from lightning_autosync.measure.drift import DriftCorrection, run_with_turns
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.plan.builders.grouping import MIB
from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.studies import distributions
from lightning_autosync.search.trial_attributes import RUN, attribute, drift_observation, is_composed, seconds_of
from lightning_autosync.search.tuning.job import PriorKnowledge
from lightning_autosync.search.tuning.settings import SearchSettings
from lightning_autosync.workload import Workload

BUCKET = "bucket_mib"
"""The parameter of a `BucketSpace`."""
MAX_BUCKET = 64.0
"""Largest bucket size in MiB and the default, as in Horovod; or the size of all gradients if that is less."""
MIN_BUCKET, MAX_BUCKETS = 1 / 16, 1024
"""Smallest bucket size in MiB (0 in Horovod); or the size of all gradients over `MAX_BUCKETS` if that is less."""


class BucketSpace:
    """A space of plans with native all-reduces in buckets of one size, with all attributes that a study needs.

    Attributes:
        semantics: always ``exact``.
    """

    semantics: Semantics = "exact"
    runs = lone = 0

    def __init__(self, workload: Workload, cluster: ClusterSpec) -> None:
        self.workload = workload
        self.cluster = cluster

    @property
    def fingerprint(self) -> str:
        """Digest of the parameter and its range."""
        return digest([BUCKET, *self.range])

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest bucket size in MiB."""
        whole = self.workload.bytes / MIB
        return min(MIN_BUCKET, whole / MAX_BUCKETS), min(MAX_BUCKET, whole)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The parameter for Optuna."""
        return {BUCKET: FloatDistribution(*self.range, log=True)}

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """A point from a trial."""
        return {BUCKET: trial.suggest_float(BUCKET, *self.range, log=True)}

    def plan(self, point: Mapping[str, Any]) -> SyncPlan:
        """The plan of a point."""
        size = int(point[BUCKET] * MIB)
        return builders.all_reduce(self.workload, self.cluster, bucket_bytes=size, first_bucket_bytes=size)

    def used(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a point that can change its plan: all."""
        return dict(point)

    def baselines(self) -> list[dict[str, Any]]:
        """Horovod's default."""
        return [{BUCKET: self.range[1]}]


Space = PlanSpace | BucketSpace


def make_sampler(settings: SearchSettings, space: Space, prior: PriorKnowledge) -> BaseSampler:
    """The sampler that the settings name.

    Optuna's samplers propose only composed plans. Builders' plans are measured anyway, and would be eleven of the
    twelve values of one parameter.

    Args:
        settings: name and seed of the sampler and, for ``autosync``, further arguments.
        space: space of the points to propose.
        prior: prior knowledge; only ``autosync`` uses it.

    Raises:
        DocumentError: a source cannot be used, or the rates of the cluster's links are unknown.
    """
    if settings.sampler == "autosync":
        assert isinstance(space, PlanSpace)
        space.cluster.require_measured()
        return AutoSyncSampler(
            space,
            estimator=prior.estimator,
            source_studies=prior.studies,
            source_samples=prior.samples,
            seed=settings.seed,
            constants=prior.constants,
            **settings.options,
        )
    of_optuna = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        base = of_optuna.get(settings.sampler, optuna.samplers.GPSampler)(seed=settings.seed)
    if isinstance(space, BucketSpace):
        return CorrectedSampler(base, space.distributions, {})
    return CorrectedSampler(base, distributions(space), {BUILDER: COMPOSED}, space.complete)


class CorrectedSampler(BaseSampler):
    """A sampler of Optuna that learns from a corrected copy of the study.

    Some samplers learn only from complete trials, and all would mistake the time of a builder's plan for that of the
    composed plan with the same parameters. In the copy, pruned trials are complete, seconds are corrected for drift,
    and trials whose parameters do not determine the plan are left out.

    Args:
        base: sampler of Optuna.
        distributions: distributions of all parameters of the study.
        fixed: values of parameters that the sampler does not choose.
        complete: adds the parameters that a trial left out to its parameters; None if trials leave out none.
    """

    def __init__(
        self,
        base: BaseSampler,
        distributions: Mapping[str, BaseDistribution],
        fixed: Mapping[str, Any],
        complete: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._base = base
        self._distributions = dict(distributions)
        self._fixed = dict(fixed)
        self._complete = complete or dict
        self._free = {name: found for name, found in distributions.items() if name not in fixed}

    def reseed_rng(self) -> None:
        self._base.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        corrected = optuna.create_study(sampler=self._base)
        corrected.add_trials(self._corrected(study, trial))
        return {**corrected.ask(self._free).params, **self._fixed}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._base.sample_independent(study, trial, param_name, param_distribution)

    def _corrected(self, study: optuna.Study, own: FrozenTrial) -> Iterator[FrozenTrial]:
        trials = study.get_trials(deepcopy=False)
        observed = list(map(drift_observation, trials))
        correction = DriftCorrection.of(observed, run_with_turns(observed, own.user_attrs.get(RUN)))
        for trial in trials:
            params = self._complete(trial.params)
            if trial.number == own.number or not is_composed(trial) or not self._free.keys() <= params.keys():
                continue
            point: dict[str, Any] = {
                "params": {name: params[name] for name in self._free},
                "distributions": self._free,
            }
            if trial.state == TrialState.RUNNING:
                yield create_trial(state=TrialState.RUNNING, **point)
            elif (seconds := seconds_of(trial)) is not None:
                yield create_trial(value=correction.convert(attribute(trial, RUN), trial.number, seconds), **point)
