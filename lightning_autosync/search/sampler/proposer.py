"""The next point: a generation of candidates every few proposals, and one choice among them for each."""

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

from lightning_autosync.learned import Estimator, ReplayEstimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import Genome, PlanSpace, Value
from lightning_autosync.replay import Constants
from lightning_autosync.search.sampler.belief import Beliefs, Believer
from lightning_autosync.search.sampler.choice import ALIKENESS, STARTUP_ALIKENESS, optimistic, pick
from lightning_autosync.search.sampler.features import Floats
from lightning_autosync.search.sampler.holdout import HoldOut
from lightning_autosync.search.sampler.observations import Choice, Observations
from lightning_autosync.search.sampler.population import Candidate, Population
from lightning_autosync.search.sampler.transplant import carried_over
from lightning_autosync.search.studies import samples_of

_BRED = 12
"""Points newly bred and priced roughly for each proposal of a batch."""
_FIRST_ROUNDS = 4
"""Generations before the first proposal; half of the first population is bred in them."""
_REFINED = 6
"""Plans newly bred that refine the best, for each proposal of a batch."""
_SHORTLIST = 1
"""Candidates newly given to the simulator for each proposal of a batch."""
_DRAWS = 50
"""Draws in search of a plan that was not tried."""
_CHOOSING = 60.0
"""Seconds after which a worker that still has not chosen is taken to be dead; by our own clock, others' may differ."""
_KEPT = 400
"""Candidates that are kept from one generation to the next."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A point to measure.

    Attributes:
        point: in its normal form.
        origin: how it came about.
        predicted: seconds of a step, as believed.
        refined: the plan to measure, if it refines the point; None for the point's own.
    """

    point: Mapping[str, Value]
    origin: str
    predicted: float
    refined: SyncPlan | None = None


@dataclass(frozen=True)
class Sizes:
    """How much is bred and how often; as arguments of `AutoSyncSampler`.

    Raises:
        ValueError: one is not a whole number, or below 1.
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
                raise ValueError(f"{name}: must be a whole number from 1 on, got {value!r}")

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """See to it that these are names and values of some of the sizes.

        Raises:
            ValueError: they are not.
        """
        names = [one.name for one in fields(cls)]
        for name in options:
            if name not in names:
                raise ValueError(f"{name}: not known; allowed: {', '.join(names)}")
        cls(**options)


@dataclass(frozen=True)
class Sources:
    """What other models and clusters have taught.

    Attributes:
        samples: measured steps, of studies too.
        points: of the space, the best of the studies' carried over.
    """

    samples: Sequence[Sample]
    points: Sequence[Genome]

    @classmethod
    def of(cls, space: PlanSpace, studies: Sequence[Study], samples: Sequence[Sample]) -> Sources:
        """Those of studies and further samples.

        Raises:
            StudyError: one is not a study of plans.
        """
        of_studies = [sample for study in studies for sample in samples_of(study)]
        points = [point for study in studies for point in carried_over(study, space)]
        if studies or samples:
            measured = len(of_studies) + len(samples)
            _log.info("from elsewhere: %d measured plans, %d of the best points carried over", measured, len(points))
        return cls([*samples, *of_studies], points)


class Proposer:
    """Proposes points of one space; see `AutoSyncSampler`, whose arguments these are."""

    def __init__(
        self,
        space: PlanSpace,
        estimator: Estimator | None,
        sources: Sources,
        sizes: Sizes,
        rng: Random,
        constants: Constants | None = None,
    ) -> None:
        if estimator is None and space.cluster.measured:
            estimator = ReplayEstimator(constants)
        constants = constants or getattr(estimator, "constants", None) or Constants()
        self.space = space
        self._holdout = (
            None
            if estimator is None or isinstance(estimator, ReplayEstimator)  # the replay learns nothing from samples
            else HoldOut(estimator, sources.samples)
        )
        self._sources = sources
        self._sizes = sizes
        self._rng = rng
        self._population = Population(space, constants, sizes.population)
        self._believer = Believer(space.workload, space.cluster, estimator, sources.samples)
        self._proposed = 0
        self._trained: int | None = None
        self._prepared_for: int | None = None
        self._seen: dict[int, float] = {}

    @property
    def takes_long(self) -> bool:
        """Whether a proposal may take long: there is a simulator to train, or there are sources to estimate."""
        return self._holdout is not None or bool(self._sources.samples)

    def is_prepared(self, number: int) -> bool:
        """Whether `prepare` was last called for the trial with this number."""
        return self._prepared_for == number

    def propose(self, observations: Observations, number: int, given: Mapping[str, Value] | None = None) -> Proposal:
        """The next point to measure.

        Args:
            observations: what the study knows.
            number: of the trial that asks: while earlier ones are still choosing, it takes a later place.
            given: values of some parameters that others have decided on; then the plan is the point's own.
        """
        if not self.is_prepared(number):
            self.prepare(observations, number)
        measured = self._measured(observations)
        self._believer.learn(measured)
        pending = self._candidates(observations.pending)
        taken = {*measured, *(one.signature for one in (*pending, *self._candidates(observations.tried)))}
        if self._proposed % self._sizes.batch == 0:
            self._generate(taken, len(measured))
        self._proposed += 1
        given = given or {}
        if given:
            taken |= {name for name, one in self._population.candidates.items() if not _fits(one, given)}
        place = sum(other < number for other in self._alive(observations.choosing))
        ready = self._ready(taken, place + 1, given)
        if len(measured) < self._sizes.startup and not self._sources.samples:
            return self._begin(ready, [*pending, *(one for one, _ in measured.values())], place)
        return self._choose(ready, pending, place)

    def prepare(self, observations: Observations, number: int) -> None:
        """What may take long of the proposal for a trial: train the simulator, if that is due, estimate the sources."""
        if not self._population.candidates:
            self._population.found(self._rng, self._sources.points)
        self._train(observations)
        self._believer.source_errors()
        self._prepared_for = number

    def _alive(self, choosing: Sequence[int]) -> list[int]:
        """Those of the trials without a choice whose workers may still be about it."""
        now = time.monotonic()
        self._seen = {number: self._seen.get(number, now) for number in choosing}
        return [number for number, since in self._seen.items() if now - since < _CHOOSING]

    def _measured(self, observations: Observations) -> dict[str, tuple[Candidate, float]]:
        """By signature a candidate and the mean of the logarithms of its times."""
        times: dict[str, tuple[Candidate, list[float]]] = {}
        for _, choice, seconds in observations.measured:
            if (candidate := self._population.of(choice)) is not None:
                times.setdefault(candidate.signature, (candidate, []))[1].append(seconds)
        return {name: (candidate, math.fsum(logs) / len(logs)) for name, (candidate, logs) in times.items()}

    def _candidates(self, choices: Sequence[Choice]) -> list[Candidate]:
        made = (self._population.of(choice) for choice in choices)
        return [candidate for candidate in made if candidate is not None]

    def _train(self, observations: Observations) -> None:
        """Train a simulator that learns: on the sources at first, then whenever enough trials came in."""
        if self._holdout is None:
            return
        measured = self._measured(observations)
        first, elsewhere = self._trained is None, len(self._sources.samples)
        if not (first and elsewhere) and len(measured) - (self._trained or 0) < self._sizes.refit:
            return
        own = self._samples(observations)
        _log.info("training the simulator on %d measured plans, %d from elsewhere", len(own) + elsewhere, elsewhere)
        again = [one for one in self._population.candidates.values() if self._believer.estimated(one)]
        self._holdout.fit(own)
        self._believer.taught(self._holdout, [candidate for candidate, _ in measured.values()])
        self._believer.estimate(again)
        self._trained = len(measured)

    def _samples(self, observations: Observations) -> list[Sample]:
        """What was measured, a sample a plan with all steps that it made, which tell its noise."""
        steps: dict[str, tuple[Candidate, list[float]]] = {}
        for number, choice, _ in observations.measured:
            if (candidate := self._population.of(choice)) is not None:
                steps.setdefault(candidate.signature, (candidate, []))[1].extend(observations.steps[number])
        return [
            Sample(self.space.workload, self.space.cluster, candidate.plan, tuple(taken), candidate.origin)
            for candidate, taken in steps.values()
        ]

    def _generate(self, taken: set[str], measured: int) -> None:
        """Breed what may be fast by rough prices, and have the best of it estimated; likewise what refines the best.

        As candidates are chosen, so points are bred: what is little known of counts as fast as it may be. Else those
        that the simulator favours would fill the population, and where it is wrong of a kind would never be seen.
        Refined are those that are believed to be the fastest.
        """
        population, believer = self._population, self._believer
        first = self._proposed == 0
        for _ in range(_FIRST_ROUNDS if first else 1):
            count = self._sizes.population // (2 * _FIRST_ROUNDS) if first else _BRED * self._sizes.batch
            population.grow(count, self._promise, self._rng)
            if self._sizes.refine is not None and measured >= self._sizes.refine:
                population.refine(_REFINED * self._sizes.batch, believer.rough, self._rng)
            everyone = list(population.candidates.values())
            order = numpy.argsort(self._promise(everyone), kind="stable")
            new = [everyone[index] for index in order if not believer.estimated(everyone[index])]
            believer.estimate(new[: _SHORTLIST * self._sizes.batch])
            believer.calibrate(everyone)
        population.trim(_KEPT, self._promise, taken)

    def _promise(self, candidates: Sequence[Candidate]) -> Floats:
        return optimistic(self._believer.guess(candidates))

    def _begin(self, ready: list[Candidate], chosen: Sequence[Candidate], place: int) -> Proposal:
        """One of the first: fast as the simulator has it, and unlike all before it."""
        estimates, deviations = self._believer.estimate(ready)
        return _proposal(ready, Beliefs(estimates, 0 * deviations), chosen, place, STARTUP_ALIKENESS)

    def _choose(self, ready: list[Candidate], pending: Sequence[Candidate], place: int) -> Proposal:
        """One of the others: fast or uncertain by belief, and unlike what is being measured."""
        return _proposal(ready, self._believer.believe(ready), pending, place, ALIKENESS)

    def _ready(self, taken: set[str], count: int, given: Mapping[str, Value]) -> list[Candidate]:
        """Candidates to choose from: those that are estimated; else any; where all plans were tried, those again."""
        free = self._free(taken)
        estimated = [one for one in free if self._believer.estimated(one)]
        if len(estimated) >= count:
            return estimated
        for _ in range(_DRAWS):
            if len(free) >= count:
                break
            self._population.add({**self.space.draw(self._rng), **given}, "drawn")
            free = self._free(taken)
        found = free or self._again(given)
        order = numpy.argsort(self._believer.rough(found), kind="stable")
        return [found[index] for index in order[:count]]

    def _again(self, given: Mapping[str, Value]) -> list[Candidate]:
        """Points of which all plans were tried: those that have what is given, if there are any."""
        points = [one for one in self._population.candidates.values() if not one.refined]
        return [one for one in points if _fits(one, given)] or points

    def _free(self, taken: set[str]) -> list[Candidate]:
        return [one for one in self._population.candidates.values() if one.signature not in taken]


def _fits(candidate: Candidate, given: Mapping[str, Value]) -> bool:
    """Whether a candidate is a point's own plan, and the point has these values."""
    return not candidate.refined and all(candidate.genome.get(name, value) == value for name, value in given.items())


def _proposal(
    ready: Sequence[Candidate], beliefs: Beliefs, chosen: Sequence[Candidate], place: int, alikeness: float
) -> Proposal:
    features = numpy.array([one.features for one in ready])
    others = numpy.array([one.features for one in chosen])
    index = pick(beliefs, features, others, place + 1, alikeness)[-1]
    best, seconds = ready[index], math.exp(float(beliefs.mean[index]))
    return Proposal(best.genome, best.origin, seconds, best.plan if best.refined else None)
