"""The Optuna side of the sampler: trials in, points out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
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
from lightning_autosync.search.sampler import generic
from lightning_autosync.search.sampler.observations import CHOICE, Observations, encode
from lightning_autosync.search.sampler.proposer import Proposal, Proposer, Sizes, Sources
from lightning_autosync.search.studies import distributions
from lightning_autosync.search.tried import ORIGIN, PREDICTED, REFINED


class AutoSyncSampler(BaseSampler):
    """Proposes plans as AutoSync does: a population is priced by simulators, and the most promising are measured.

    The replay prices a population of points roughly, evolution and moves between neighbours breed more, the simulator
    prices the best of them, and what it gets wrong is learned from every trial. Proposed is what is fast by belief,
    uncertain, and unlike what is being measured already. No plan is proposed twice.

    All that it knows of a study it reads from the storage, so that several threads, processes and machines may work on
    one study, and an interrupted one goes on. A trial may be given some of its parameters (``study.enqueue_trial``); it
    proposes the others to match. Parameters that are none of the space's are drawn at random. Without a space it
    evolves the best trials, whatever their parameters are.

    Args:
        space: whose points the trials of a study are; see ``suggest``.
        estimator: the simulator, which is trained further as trials come in, and copies of it (by ``copy.deepcopy``)
            beside it; None takes the replay alone, or nothing where the rates of the links are unknown.
        source_studies: studies of other models or clusters. They train the simulator, their errors tell about this
            one's, and their best points are carried over; the study itself is not touched.
        source_samples: measured steps of other models or clusters, used likewise.
        seed: of all draws; None takes one from the system.
        population: points that are priced before the first proposal.
        batch: proposals between two generations; each prices ``12 * batch`` new points.
        startup: trials before which only the simulator's price and unlikeness count, where no source tells more.
        refit: trials after which a learned simulator is trained again.
        refine: measured trials from which on plans are proposed, too, that no point stands for: the best ones changed
            message by message and variable by variable. Such a trial has the point that its plan refines for params
            and carries the plan itself; take the plans of trials by ``plan_of`` then. None proposes points alone.
        constants: of the hosts, for rough prices; None takes the estimator's.

    Raises:
        StudyError: a source is not a study of plans.
        ValueError: a size is not a whole number, or below 1.
    """

    def __init__(
        self,
        space: PlanSpace | None = None,
        *,
        estimator: Estimator | None = None,
        source_studies: Sequence[Study] = (),
        source_samples: Sequence[Sample] = (),
        seed: int | None = None,
        population: int = Sizes.population,
        batch: int = Sizes.batch,
        startup: int = Sizes.startup,
        refit: int = Sizes.refit,
        refine: int | None = Sizes.refine,
        constants: Constants | None = None,
    ) -> None:
        self._space = space
        self._rng = Random(seed)
        self._random = RandomSampler(seed=seed)
        self._lock = threading.Lock()
        self._proposer: Proposer | None = None
        if space is not None:
            sizes = Sizes(population, batch, startup, refit, refine)
            sources = Sources.of(space, source_studies, source_samples)
            self._proposer = Proposer(space, estimator, sources, sizes, self._rng, constants)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def reseed_rng(self) -> None:
        """Draw otherwise from now on: replicas of a sampler must not propose the same."""
        self._rng.seed()
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole space from the first trial on; without one, what all trials so far have in common."""
        if self._space is not None:
            return dict(distributions(self._space))
        common = intersection_search_space(study.get_trials(deepcopy=False))
        return {name: distribution for name, distribution in common.items() if not distribution.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A point; it is published as a system attribute of the trial before it is returned.

        Raises:
            ValueError: the study has several objectives, or wants its objective, a time, to be large; or only some of
                the space's parameters are asked for.
        """
        self._raise_error_if_multi_objective(study)
        if self._proposer is None or not search_space.keys() <= self._proposer.space.parameters.keys():
            return self._evolve(study, trial, search_space)
        if not search_space:
            return {}
        if study.direction != StudyDirection.MINIMIZE:
            raise ValueError("AutoSyncSampler: a study of plans minimizes the seconds of a step")
        space = self._proposer.space
        if missing := sorted(space.parameters.keys() - search_space.keys()):
            raise ValueError(
                f"AutoSyncSampler: it proposes whole plans, and is not asked for {', '.join(missing)}; to fix these, "
                "give them to each trial by study.enqueue_trial, in place of a PartialFixedSampler"
            )
        with self._lock:
            if self._proposer.takes_long and not self._proposer.is_prepared(trial.number):
                # The study is read again afterwards: others may have gone on for minutes.
                self._proposer.prepare(self._observed(study, trial.number), trial.number)
            observations, given = self._observed(study, trial.number), trial.system_attrs.get("fixed_params", {})
            proposal = self._proposer.propose(observations, trial.number, given)
            self._publish(study, trial, proposal, space)
        return dict(proposal.point)

    def prepare(self, trials: Sequence[FrozenTrial], number: int) -> None:
        """Do what may take long of the proposal for one trial: train the simulator, where that is due, and estimate
        the sources.

        The proposal would do so itself. This is for those who hold signals back while a trial is given its point: with
        thousands of samples from elsewhere, training takes minutes. Nothing is written to the study.

        Args:
            trials: all of the study.
            number: of the trial; nothing is done for one whose parameters are all given.
        """
        if self._proposer is None or not self._proposer.takes_long:
            return
        space = self._proposer.space
        own = next((trial for trial in trials if trial.number == number), None)
        given: Mapping[str, Any] = {} if own is None else own.system_attrs.get("fixed_params", {})
        if not given.keys() >= space.parameters.keys():
            with self._lock:
                self._proposer.prepare(Observations.of(trials, space, number), number)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value drawn at random, for parameters that are not in the space or not in all trials."""
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
            return generic.evolve(trials, study.direction, search_space, self._rng, draw)

    def _publish(self, study: Study, trial: FrozenTrial, proposal: Proposal, space: PlanSpace) -> None:
        storage: optuna.storages.BaseStorage = study._storage
        notes: dict[str, Any] = {ORIGIN: proposal.origin, PREDICTED: proposal.predicted}
        if proposal.refined is not None:
            notes[REFINED] = json.dumps(proposal.refined.to_dict(), separators=(",", ":"))
        for name, value in notes.items():
            storage.set_trial_user_attr(trial._trial_id, name, value)
            trial.user_attrs[name] = value  # a live trial keeps its own copy, as `Trial.set_user_attr` knows
        # Last: whoever sees the choice finds the others too.
        storage.set_trial_system_attr(trial._trial_id, CHOICE, encode(proposal.point, space))
