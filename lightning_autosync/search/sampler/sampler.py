"""`AutoSyncSampler`: the interface of the sampler to Optuna. Trials in, points out."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import intersection_search_space
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightning_autosync.learned import Estimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants
from lightning_autosync.search.sampler.observations import CHOICE, Observations, encode
from lightning_autosync.search.sampler.proposer import Proposal, Proposer, SamplerSizes, TransferredData
from lightning_autosync.search.studies import distributions
from lightning_autosync.search.trial_attributes import ORIGIN, PREDICTED, REFINED

_GENERIC_STARTUP = 10
"""Without a space: number of random trials before the first child."""
_GENERIC_PARENTS = 0.25
"""Without a space: share of the best trials that have children; at least four trials."""


class AutoSyncSampler(BaseSampler):
    """Proposes plans like AutoSync: simulators predict times of a population of plans, and the best are measured.

    The replay prices a population of points roughly. Evolution and moves between neighbours add more points. The
    simulator prices the best of them, and a Gaussian process learns its errors from every trial. The sampler proposes
    plans that are predicted to be fast or uncertain, and that differ from plans being measured. It proposes no plan
    twice as long as there are others.

    The sampler reads the whole state of a study from its storage. So several threads, processes and machines may work
    on one study, and an interrupted study can be resumed. A trial may have some fixed parameters
    (``study.enqueue_trial``); the sampler proposes matching values for the others. Parameters that are not in the space
    are drawn at random. Without a space the sampler evolves the best trials, whatever their parameters are.

    Args:
        space: space of the trials' points; see `lightning_autosync.search.studies.suggest`.
        estimator: simulator. One that was fitted before the search stays as it is, and the error model corrects it. Any
            other that learns is trained on new trials, and so are copies of it (by ``copy.deepcopy``). None uses the
            replay, or no simulator if the rates of the links are unknown.
        source_studies: studies of other models or clusters, which are not changed. They train the simulator, the error
            model learns from them, and their best points are tried here.
        source_samples: measured steps of other models or clusters, used in the same way.
        seed: seed of all random draws; None draws one.
        population: number of points to price before the first proposal.
        batch: number of proposals between two generations. Each generation prices ``12 * batch`` new points.
        startup: number of first trials that are chosen only by the simulator's price and by dissimilarity; without
            effect if there are sources.
        refit: number of trials after which a simulator that was not fitted before is trained again.
        refine: number of measured trials after which refined plans are proposed too. They change the best plans message
            by message, so that no point of the space represents them. Such a trial has the parameters of the refined
            point and stores the plan; `lightning_autosync.search.trial_attributes.plan_of` returns it. None proposes
            only points.
        constants: constants of the hosts for rough prices; None uses the estimator's.

    Raises:
        StudyError: a source is not a study of plans.
        ValueError: a size is not an integer of at least 1.
    """

    def __init__(
        self,
        space: PlanSpace | None = None,
        *,
        estimator: Estimator | None = None,
        source_studies: Sequence[Study] = (),
        source_samples: Sequence[Sample] = (),
        seed: int | None = None,
        population: int = SamplerSizes.population,
        batch: int = SamplerSizes.batch,
        startup: int = SamplerSizes.startup,
        refit: int = SamplerSizes.refit,
        refine: int | None = SamplerSizes.refine,
        constants: Constants | None = None,
    ) -> None:
        self._space = space
        self._rng = Random(seed)
        self._random = RandomSampler(seed=seed)
        self._lock = threading.Lock()
        self._proposer: Proposer | None = None
        if space is not None:
            sizes = SamplerSizes(population, batch, startup, refit, refine)
            transferred = TransferredData.of(space, source_studies, source_samples)
            self._proposer = Proposer(space, estimator, transferred, sizes, self._rng, constants)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_lock"]  # a lock cannot be pickled or copied
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def reseed_rng(self) -> None:
        """Reseed the random generators, so that copies of a sampler do not propose the same plans."""
        self._rng.seed()
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole space from the first trial on; without a space, the common parameters of all trials so far."""
        if self._space is not None:
            return dict(distributions(self._space))
        common = intersection_search_space(study.get_trials(deepcopy=False))
        return {name: distribution for name, distribution in common.items() if not distribution.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A point. It is stored as a system attribute of the trial first, so that other processes avoid it.

        Raises:
            ValueError: the study has several objectives, maximizes a time, or asks for only some of the space's
                parameters.
        """
        self._raise_error_if_multi_objective(study)
        if self._proposer is None or not search_space.keys() <= self._proposer.space.parameters.keys():
            return self._evolve(study, trial, search_space)
        if not search_space:
            return {}
        if study.direction != StudyDirection.MINIMIZE:
            raise ValueError("AutoSyncSampler: the study's direction must be 'minimize'")
        space = self._proposer.space
        if missing := sorted(space.parameters.keys() - search_space.keys()):
            raise ValueError(
                f"AutoSyncSampler: it proposes whole plans, but does not get {', '.join(missing)}; to fix parameters, "
                "call study.enqueue_trial for each trial instead of using a PartialFixedSampler"
            )
        with self._lock:
            if self._proposer.is_slow and not self._proposer.is_prepared(trial.number):
                # Read the study again afterwards, because other processes may have added trials in the meantime.
                self._proposer.prepare(self._observed(study, trial.number), trial.number)
            observations, given = self._observed(study, trial.number), trial.system_attrs.get("fixed_params", {})
            proposal = self._proposer.propose(observations, trial.number, given)
            _publish(study, trial, proposal, space)
        return dict(proposal.point)

    def prepare(self, trials: Sequence[FrozenTrial], number: int) -> None:
        """Do the slow part of one trial's proposal: train the simulator if it is time, and estimate the sources.

        The proposal would do this itself. Call this first if signals are blocked during the proposal: with thousands of
        transferred samples, training takes minutes. Nothing is written to the study.

        Args:
            trials: all trials of the study.
            number: number of the trial. Nothing is done if all the parameters that its plan uses are fixed.
        """
        if self._proposer is None or not self._proposer.is_slow:
            return
        space = self._proposer.space
        own = next((trial for trial in trials if trial.number == number), None)
        given: Mapping[str, Any] = {} if own is None else own.system_attrs.get("fixed_params", {})
        if not space.complete(given).keys() >= space.parameters.keys():
            with self._lock:
                self._proposer.prepare(Observations.of(trials, space, number), number)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A random value for parameters that are not in the space or not in all trials."""
        self._raise_error_if_multi_objective(study)
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._random.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._random.after_trial(study, trial, state, values)

    def _observed(self, study: Study, number: int) -> Observations:
        assert self._proposer is not None
        return Observations.of(study.get_trials(deepcopy=False), self._proposer.space, number)

    def _evolve(self, study: Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        def draw(name: str, distribution: BaseDistribution) -> Any:
            return self._random.sample_independent(study, trial, name, distribution)

        with self._lock:
            trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
            return _evolved(_ranked(trials, study.direction, search_space), search_space, self._rng, draw)


def _publish(study: Study, trial: FrozenTrial, proposal: Proposal, space: PlanSpace) -> None:
    storage: optuna.storages.BaseStorage = study._storage
    notes: dict[str, Any] = {ORIGIN: proposal.origin, PREDICTED: proposal.predicted}
    if proposal.refined is not None:
        notes[REFINED] = json.dumps(proposal.refined.to_dict(), separators=(",", ":"))
    for name, value in notes.items():
        storage.set_trial_user_attr(trial._trial_id, name, value)
        trial.user_attrs[name] = value  # a live trial has its own copy, which `Trial.set_user_attr` updates as well
    # Written last: a process that sees the choice must find the other attributes too.
    storage.set_trial_system_attr(trial._trial_id, CHOICE, encode(proposal.point, space))


def _evolved(
    ranked: Sequence[FrozenTrial],
    search_space: Mapping[str, BaseDistribution],
    rng: Random,
    draw: Callable[[str, BaseDistribution], Any],
) -> dict[str, Any]:
    """A child of two of the best trials: each parameter from either parent. On average one parameter is redrawn."""
    if len(ranked) < _GENERIC_STARTUP:
        return {name: draw(name, distribution) for name, distribution in search_space.items()}
    best = ranked[: max(4, math.ceil(_GENERIC_PARENTS * len(ranked)))]
    parents = rng.choice(best), rng.choice(best)
    child = {name: rng.choice(parents).params[name] for name in search_space}
    for name, distribution in search_space.items():
        if rng.random() < 1 / len(search_space):
            child[name] = draw(name, distribution)
    return child


def _ranked(
    trials: Sequence[FrozenTrial], direction: StudyDirection, search_space: Mapping[str, BaseDistribution]
) -> list[FrozenTrial]:
    """Trials that have all parameters, best first. Running trials count as the worst value so far (constant liar)."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    known = [trial for trial in trials if search_space.keys() <= trial.params.keys()]
    values = {
        trial.number: sign * trial.value
        for trial in known
        if trial.state == TrialState.COMPLETE and trial.value is not None and not math.isnan(trial.value)
    }
    worst = max(values.values(), default=math.inf)
    values |= {trial.number: worst for trial in known if trial.state == TrialState.RUNNING}
    return sorted((trial for trial in known if trial.number in values), key=lambda t: (values[t.number], t.number))
