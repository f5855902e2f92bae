"""Samplers by name."""

from __future__ import annotations

import warnings

import optuna

from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.studies import distributions
from lightning_autosync.search.tuning.buckets import BucketSpace
from lightning_autosync.search.tuning.mirror import MirrorSampler
from lightning_autosync.search.tuning.settings import SearchSettings
from lightning_autosync.search.tuning.sources import Sources

Space = PlanSpace | BucketSpace


def make_sampler(settings: SearchSettings, space: Space, sources: Sources) -> optuna.samplers.BaseSampler:
    """The sampler that the settings name.

    Those of Optuna propose composed plans only: builders' plans are tried anyway, and would be eleven of twelve values
    of one parameter.

    Args:
        settings: its name, its seed and, for ``autosync``, further arguments.
        space: whose points it proposes.
        sources: what ``autosync`` asks; the others ask nobody.

    Raises:
        DocumentError: a source cannot be used, or the rates of the cluster's links are unknown.
    """
    if settings.sampler == "autosync":
        assert isinstance(space, PlanSpace)
        return _autosync(settings, space, sources)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        base = _of_optuna(settings)
    if isinstance(space, BucketSpace):
        return MirrorSampler(base, space.distributions, {})
    return MirrorSampler(base, distributions(space), {BUILDER: COMPOSED})


def _of_optuna(settings: SearchSettings) -> optuna.samplers.BaseSampler:
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=settings.seed)
    if settings.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=settings.seed)
    return optuna.samplers.GPSampler(seed=settings.seed)


def _autosync(settings: SearchSettings, space: PlanSpace, sources: Sources) -> optuna.samplers.BaseSampler:
    space.cluster.require_measured()
    return AutoSyncSampler(
        space,
        estimator=sources.estimator,
        source_studies=sources.studies,
        source_samples=sources.samples,
        seed=settings.seed,
        constants=sources.constants,
        **settings.options,
    )
