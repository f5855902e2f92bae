"""Proposes the next plan to measure: a generation of candidates every few proposals, and one choice for each."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import numpy
from optuna.study import Study

from lightning_autosync.documents import counted, unknown_name
from lightning_autosync.learned import Estimator, ReplayEstimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import Genome, PlanSpace, Value
from lightning_autosync.replay import Constants
from lightning_autosync.search.features import Floats, similarity
from lightning_autosync.search.population import Candidate, Population
from lightning_autosync.search.sampler.cost_model import CostEstimate, CostModel, CrossFit
from lightning_autosync.search.sampler.observations import Choice, Observations
from lightning_autosync.search.studies import samples_of
from lightning_autosync.search.transfer import best_points

_EVOLVED = 12
"""New points with rough prices for each proposal of a batch."""
_FIRST_GENERATIONS = 4
"""Number of generations before the first proposal, which make half of the first population."""
_REFINED = 6
"""New refinements of the best plans for each proposal of a batch."""
_SIMULATED = 1
"""New candidates that the simulator estimates for each proposal of a batch."""
_MAX_DRAWS = 50
"""Maximum number of random points to find a plan that was not measured."""
_MAX_CHOOSING = 60.0
"""Seconds, by this process's clock, after which a trial without a choice counts as dead."""
_KEPT = 400
"""Number of candidates to keep between generations."""
_OPTIMISM = 1.0
"""Number of standard deviations below the mean in a candidate's lower confidence bound."""
_SIMILARITY_COST = 0.03
"""Penalty of a candidate, in logarithms of seconds, for being equal to one that is being measured."""
_FIRST_SIMILARITY_COST = 0.2
"""The same among the first trials, higher because diverse plans show where the simulator errs."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A plan to measure.

    Attributes:
        origin: how the candidate was generated.
        predicted: estimated seconds of a step.
        refined: plan to measure if it refines the point; None for the point's own plan.
    """

    point: Mapping[str, Value]
    origin: str
    predicted: float
    refined: SyncPlan | None = None


@dataclass(frozen=True)
class SamplerSizes:
    """Numbers of candidates, and how often the simulator is trained; see the arguments of `AutoSyncSampler`.

    Raises:
        ValueError: a size is not an integer of at least 1.
    """

    population: int = 384
    batch: int = 8
    startup: int = 8
    refit: int = 25
    refine: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name == "refine":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: must be an integer of 1 or more, got {value!r}")

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Check names and values of some sizes.

        Raises:
            ValueError: a name is unknown or a value is wrong.
        """
        names = [one.name for one in fields(cls)]
        for name in options:
            if name not in names:
                raise ValueError(f"{name}: {unknown_name(name, names)}")
        cls(**options)


@dataclass(frozen=True)
class TransferredData:
    """Results of other models and clusters.

    Attributes:
        samples: measured plans, including those of studies.
        points: best points of the studies, mapped to the space.
    """

    samples: Sequence[Sample]
    points: Sequence[Genome]

    @classmethod
    def of(cls, space: PlanSpace, studies: Sequence[Study], samples: Sequence[Sample]) -> TransferredData:
        """From studies and further samples.

        Raises:
            StudyError: a study is not a study of plans.
        """
        of_studies = [sample for study in studies for sample in samples_of(study)]
        points = [point for study in studies for point in best_points(study, space)]
        if studies or samples:
            measured = counted(len(of_studies) + len(samples), "measured plan")
            _log.info("transferred from other studies: %s and %s", measured, counted(len(points), "best point"))
        return cls([*samples, *of_studies], points)


class Proposer:
    """Proposes points of one space; see `AutoSyncSampler` for the arguments."""

    def __init__(
        self,
        space: PlanSpace,
        estimator: Estimator | None,
        transferred: TransferredData,
        sizes: SamplerSizes,
        rng: Random,
        constants: Constants | None = None,
    ) -> None:
        if estimator is None and space.cluster.measured:
            estimator = ReplayEstimator(constants)
        constants = constants or getattr(estimator, "constants", None) or Constants()
        self.space = space
        # A fitted simulator stays as it is: the error model corrects it after every trial, in milliseconds.
        is_fixed = isinstance(estimator, ReplayEstimator) or getattr(estimator, "is_fitted", False)
        self._cross_fit = None if estimator is None or is_fixed else CrossFit(estimator, transferred.samples)
        self._transferred = transferred
        self._sizes = sizes
        self._rng = rng
        self._population = Population(space, constants, sizes.population)
        self._cost = CostModel(space.workload, space.cluster, estimator, transferred.samples)
        self._proposed = 0
        self._trained: int | None = None
        self._prepared_for: int | None = None
        self._choosing_since: dict[int, float] = {}

    @property
    def is_slow(self) -> bool:
        """Whether a proposal may take long: a simulator is trained, or transferred samples are estimated."""
        return self._cross_fit is not None or bool(self._transferred.samples)

    def is_prepared(self, number: int) -> bool:
        """Whether `prepare` was last called for the trial with this number."""
        return self._prepared_for == number

    def prepare(self, observations: Observations, number: int) -> None:
        """Do the slow part of a trial's proposal: train the simulator if it is time, and estimate the sources."""
        if not self._population.candidates:
            self._population.start(self._rng, self._transferred.points)
        self._train(observations)
        self._cost.source_errors()
        self._prepared_for = number

    def propose(self, observations: Observations, number: int, given: Mapping[str, Value] | None = None) -> Proposal:
        """The next point to measure.

        Args:
            number: number of the trial. While k earlier trials are still choosing, it gets the plan on place k + 1, so
                that processes that choose at the same time do not choose the same plan.
            given: fixed values of some parameters; then the plan is the point's own.
        """
        if not self.is_prepared(number):
            self.prepare(observations, number)
        measured = self._measured(observations)
        self._cost.learn(measured)
        pending = self._candidates(observations.pending)
        taken = {*measured, *(one.signature for one in (*pending, *self._candidates(observations.failed)))}
        if self._proposed % self._sizes.batch == 0:
            self._generate(taken, len(measured))
        self._proposed += 1
        given = given or {}
        if given:
            taken |= {name for name, one in self._population.candidates.items() if not _has_values(one, given)}
        place = sum(other < number for other in self._alive(observations.choosing))
        ready = self._ready(taken, place + 1, given)
        if len(measured) < self._sizes.startup and not self._transferred.samples:
            simulated = self._cost.simulate(ready)
            certain = CostEstimate(simulated.mean, 0 * simulated.deviation)
            others = [*pending, *(one for one, _ in measured.values())]
            return _chosen(ready, certain, others, place, _FIRST_SIMILARITY_COST)
        return _chosen(ready, self._cost.estimate(ready), pending, place, _SIMILARITY_COST)

    def _alive(self, choosing: Sequence[int]) -> list[int]:
        """The trials without a choice whose processes may still be choosing."""
        now = time.monotonic()
        self._choosing_since = {number: self._choosing_since.get(number, now) for number in choosing}
        return [number for number, since in self._choosing_since.items() if now - since < _MAX_CHOOSING]

    def _measured(self, observations: Observations) -> dict[str, tuple[Candidate, float]]:
        """By signature, a candidate and the mean of the logarithms of its times."""
        times: dict[str, tuple[Candidate, list[float]]] = {}
        for _, choice, seconds in observations.measured:
            if (candidate := self._population.of(choice)) is not None:
                times.setdefault(candidate.signature, (candidate, []))[1].append(seconds)
        return {name: (candidate, math.fsum(logs) / len(logs)) for name, (candidate, logs) in times.items()}

    def _candidates(self, choices: Sequence[Choice]) -> list[Candidate]:
        found = (self._population.of(choice) for choice in choices)
        return [candidate for candidate in found if candidate is not None]

    def _train(self, observations: Observations) -> None:
        """Train a simulator that learns: first on the sources, then after every ``refit`` further measured plans."""
        if self._cross_fit is None:
            return
        measured = self._measured(observations)
        first, elsewhere = self._trained is None, len(self._transferred.samples)
        if not (first and elsewhere) and len(measured) - (self._trained or 0) < self._sizes.refit:
            return
        own = self._samples(observations)
        _log.info(
            "training the simulator on %d measured plans, %d of them transferred", len(own) + elsewhere, elsewhere
        )
        again = [one for one in self._population.candidates.values() if self._cost.is_simulated(one)]
        self._cross_fit.fit(own)
        self._cost.use_trained(self._cross_fit, [candidate for candidate, _ in measured.values()])
        self._cost.simulate(again)
        self._trained = len(measured)

    def _samples(self, observations: Observations) -> list[Sample]:
        """A sample for each measured plan with all its steps, whose spread shows the noise."""
        steps: dict[str, tuple[Candidate, list[float]]] = {}
        for number, choice, _ in observations.measured:
            if (candidate := self._population.of(choice)) is not None:
                steps.setdefault(candidate.signature, (candidate, []))[1].extend(observations.steps[number])
        return [
            Sample(self.space.workload, self.space.cluster, candidate.plan, tuple(taken), candidate.origin)
            for candidate, taken in steps.values()
        ]

    def _generate(self, taken: set[str], measured: int) -> None:
        """Evolve candidates by rough estimates, and let the simulator estimate the best of them.

        Evolution selects points by their lower confidence bounds. By plain estimates, kinds of plans that the simulator
        wrongly predicts as slow would never be measured, and the error would never be found. Refinement selects plans
        by plain estimates.
        """
        population, cost = self._population, self._cost
        first = self._proposed == 0
        for _ in range(_FIRST_GENERATIONS if first else 1):
            count = self._sizes.population // (2 * _FIRST_GENERATIONS) if first else _EVOLVED * self._sizes.batch
            population.grow(count, self._rough_bound, self._rng)
            if self._sizes.refine is not None and measured >= self._sizes.refine:
                population.refine(_REFINED * self._sizes.batch, lambda found: cost.rough(found).mean, self._rng)
            ordered = population.best(self._rough_bound, len(population.candidates))
            new = [one for one in ordered if not cost.is_simulated(one)]
            cost.simulate(new[: _SIMULATED * self._sizes.batch])
            cost.calibrate(list(population.candidates.values()))
        population.trim(_KEPT, self._rough_bound, taken)

    def _rough_bound(self, candidates: Sequence[Candidate]) -> Floats:
        return lower_bound(self._cost.rough(candidates))

    def _ready(self, taken: set[str], count: int, given: Mapping[str, Value]) -> list[Candidate]:
        """Candidates to choose from: simulated ones if enough, else any; measured ones again if no others are left."""
        free = self._free(taken)
        simulated = [one for one in free if self._cost.is_simulated(one)]
        if len(simulated) >= count:
            return simulated
        for _ in range(_MAX_DRAWS):
            if len(free) >= count:
                break
            self._population.add({**self.space.draw(self._rng), **given}, "drawn")
            free = self._free(taken)
        found = free or self._measured_again(given)
        order = numpy.argsort(self._cost.rough(found).mean, kind="stable")
        return [found[index] for index in order[:count]]

    def _measured_again(self, given: Mapping[str, Value]) -> list[Candidate]:
        points = [one for one in self._population.candidates.values() if not one.refined]
        return [one for one in points if _has_values(one, given)] or points

    def _free(self, taken: set[str]) -> list[Candidate]:
        return [one for one in self._population.candidates.values() if one.signature not in taken]


def _has_values(candidate: Candidate, given: Mapping[str, Value]) -> bool:
    """Whether a candidate is a point's own plan and the point has the ``given`` values."""
    return not candidate.refined and all(candidate.genome.get(name, value) == value for name, value in given.items())


def lower_bound(cost: CostEstimate) -> Floats:
    """[n] lower confidence bounds of the logarithms of seconds (Srinivas et al., 2010)."""
    bounds: Floats = cost.mean - _OPTIMISM * cost.deviation
    return bounds


def pick(
    cost: CostEstimate, features: Floats, chosen: Floats, count: int, similarity_cost: float = _SIMILARITY_COST
) -> list[int]:
    """Indices of the best ``count`` candidates in order, each dissimilar to ``chosen`` and to those picked before.

    Greedy for low time and low similarity (AutoSync, section 4); uncertainty counts as in `lower_bound`.

    Args:
        cost: estimates of n candidates.
        features: [n, features] features of the candidates.
        chosen: [m, features] features of plans that are being measured.
        count: number of candidates to pick; at most n are returned.
        similarity_cost: penalty for being equal to a chosen plan, in logarithms of seconds.
    """
    value = lower_bound(cost)
    likeness = similarity(features, chosen).max(axis=1) if len(chosen) else numpy.zeros(len(features))
    picked: list[int] = []
    for _ in range(min(count, len(features))):
        total = value + similarity_cost * likeness
        total[picked] = numpy.inf
        best = int(numpy.argmin(total))
        picked.append(best)
        likeness = numpy.maximum(likeness, similarity(features, features[best : best + 1])[:, 0])
    return picked


def _chosen(
    ready: Sequence[Candidate], cost: CostEstimate, others: Sequence[Candidate], place: int, similarity_cost: float
) -> Proposal:
    """The candidate at ``place`` in the order of `pick`."""
    features = numpy.array([one.features for one in ready])
    index = pick(cost, features, numpy.array([one.features for one in others]), place + 1, similarity_cost)[-1]
    best, seconds = ready[index], math.exp(float(cost.mean[index]))
    return Proposal(best.genome, best.origin, seconds, best.plan if best.refined else None)
