"""Candidates: points of a space with their plans and rough prices, evolved towards low prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from random import Random
from typing import NamedTuple

import numpy

from lightning_autosync.documents import parse_json
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan import SyncPlan, compile_plan, signature
from lightning_autosync.plan.schedule import first_parameters_first
from lightning_autosync.plan.space import Genome, PlanSpace, Refinement, Value
from lightning_autosync.replay import Constants, Replay, overlapped_step
from lightning_autosync.replay.replay import FRAMES_LIMIT, Detail
from lightning_autosync.search.features import Floats, PlanFeatures

Score = Callable[[Sequence["Candidate"]], Floats]
"""Maps n candidates to [n] numbers, lower for better candidates, such as logarithms of estimated seconds."""
BUILT = "builder"
"""Origin of candidates that are a builder's plan."""
_MAX_NEIGHBOURS = 200
_LEAST_SECONDS = 1e-12
"""Price of a step that takes no time: one rank, ideal hosts and unknown times of computation."""

Point = dict[str, Value]


class Choice(NamedTuple):
    """What a trial measures.

    Attributes:
        refined: document of a plan that refines the point, as JSON text; None for the point's own plan.
    """

    point: Point
    refined: str | None = None


class _Price(NamedTuple):
    """The logarithm of a step's predicted seconds, and the number of frames in the step."""

    log_seconds: float
    frames: int


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that may be proposed.

    Attributes:
        genome: point of the plan, in normal form.
        origin: how the candidate was generated.
        signature: signature of the plan. Plans with the same signature do the same.
        features: [features] feature vector of the plan.
        rough: logarithm of a step's seconds by a fluid replay, in which messages flow as a whole; 0 if the rates of the
            links are unknown.
        is_precise: whether ``rough`` is the replay's best estimate, because its step has too many frames to simulate.
        refined: whether the plan refines the point instead of being the point's own plan.
    """

    genome: Mapping[str, Value]
    origin: str
    plan: SyncPlan
    signature: str
    features: Floats
    rough: float
    is_precise: bool = False
    refined: bool = False


class Population:
    """The candidates of one space. A plan that does not compile never becomes a candidate.

    Args:
        constants: constants of the hosts, for the replay.
        size: number of points to price before the first proposal; half of them are the first generation.
        two_level_collectives: as for `compile_plan`.
        overlaps: whether prices are those of steps that overlap with the next forward pass (``overlap="step"``).
        stop: function that is asked before each new candidate; once it says True, `start`, `grow` and `refine` return.
            None lets them finish.
    """

    def __init__(
        self,
        space: PlanSpace,
        constants: Constants,
        size: int,
        two_level_collectives: bool = False,
        stop: Callable[[], bool] | None = None,
        overlaps: bool = False,
    ) -> None:
        self.space, self.constants = space, constants
        self.candidates: dict[str, Candidate] = {}
        self._size = size
        self._two_level_collectives = two_level_collectives
        self._overlaps = overlaps
        self._should_stop = stop
        self._by_point: dict[tuple[Value, ...], Candidate | None] = {}
        self._by_document: dict[str, Candidate | None] = {}
        self._expanded: set[str] = set()
        self._replay = Replay(space.workload, space.cluster, constants) if space.cluster.measured else None
        self._features = PlanFeatures(space.workload)
        self._refinement = Refinement(space.workload, space.cluster)

    def _is_stopped(self) -> bool:
        return self._should_stop is not None and self._should_stop()

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.space.parameters)

    def of(self, choice: Choice) -> Candidate | None:
        """The candidate of a trial's choice; None if its plan does not compile."""
        if choice.refined is None:
            return self.add(choice.point, "measured")
        if choice.refined not in self._by_document:
            try:
                plan = SyncPlan.from_dict(parse_json(choice.refined, "refined", PlanError), "refined")
            except DocumentError:
                self._by_document[choice.refined] = None
            else:
                self._by_document[choice.refined] = self._add_refined(self.space.normal(choice.point), plan)
        return self._by_document[choice.refined]

    def add(self, genome: Genome, origin: str) -> Candidate | None:
        """The candidate of a point; None if its plan does not compile."""
        point = self.space.normal(genome)
        key = tuple(point[name] for name in self._names)
        if key not in self._by_point:
            self._by_point[key] = self._add_point(point, origin)
        return self._by_point[key]

    def add_plan(self, plan: SyncPlan, origin: str) -> Candidate | None:
        """The candidate of any plan, which cannot be a parent; None if it does not compile."""
        return self._add_refined({}, plan, origin)

    def _add_point(self, point: dict[str, Value], origin: str) -> Candidate | None:
        try:
            made = self._priced(point, origin, self.space.plan(point))
        except DocumentError:
            return None
        there = self.candidates.get(made.signature)
        # A point's own plan replaces an equal refinement of another point, since only points can be parents and match
        # given parameters.
        made = made if there is None or there.refined else there
        self.candidates[made.signature] = made
        return made

    def _add_refined(self, point: Mapping[str, Value], plan: SyncPlan, origin: str = "refined") -> Candidate | None:
        """The candidate of a plan that refines a point, or an existing candidate with the same signature."""
        name = signature(plan)
        if name not in self.candidates:
            try:
                self.candidates[name] = replace(self._priced(point, origin, plan), refined=True)
            except DocumentError:
                return None
        return self.candidates[name]

    def _priced(self, point: Mapping[str, Value], origin: str, plan: SyncPlan) -> Candidate:
        price = self._price(plan, "fluid")
        rough = 0.0 if price is None else price.log_seconds
        is_precise = price is None or price.frames > FRAMES_LIMIT
        return Candidate(point, origin, plan, signature(plan), self._features(plan), rough, is_precise)

    def precise(self, candidate: Candidate) -> float:
        """Logarithm of a step's seconds by the replay, frame by frame if there are few."""
        price = None if candidate.is_precise else self._price(candidate.plan, "auto")
        return candidate.rough if price is None else price.log_seconds

    def _price(self, plan: SyncPlan, detail: Detail) -> _Price | None:
        """The price of a plan that compiles; None if the rates of the links are unknown."""
        workload, two_levels = self.space.workload, self._two_level_collectives
        schedule = compile_plan(plan, workload, self.space.cluster, two_level_collectives=two_levels)
        if self._replay is None:
            return None
        if self._overlaps:
            schedule = first_parameters_first(schedule, [variable.name for variable in workload.variables])
        found = self._replay.predict(schedule, detail)
        seconds = overlapped_step(schedule, workload, found) if self._overlaps else found.step_time
        return _Price(math.log(max(seconds, _LEAST_SECONDS)), found.frames)

    def start(self, rng: Random, seeds: Iterable[Genome] = ()) -> None:
        """The first generation: transferred ``seeds``, builders, points that treat all blocks alike, random points."""
        for genome, origin in self._first(rng, seeds):
            if self._is_stopped():
                return
            self.add(genome, origin)

    def _first(self, rng: Random, seeds: Iterable[Genome]) -> Iterator[tuple[Genome, str]]:
        """The points of the first generation, each with its origin."""
        yield from ((genome, "transferred") for genome in seeds)
        yield from ((genome, BUILT) for genome in self.space.baselines())
        coherent = list(self.space.coherent())
        sample = rng.sample(coherent, min(len(coherent), self._size // 4))
        yield from ((genome, "coherent") for genome in sample)
        yield from ((self.space.draw(rng), "drawn") for _ in range(self._size // 4))

    def grow(self, count: int, score: Score, rng: Random) -> None:
        """Price up to ``count`` new points: half of them neighbours, the others children of the best points."""
        target = len(self._by_point) + count
        half = len(self._by_point) + count // 2
        for _ in range(count):
            if len(self._by_point) >= half or self._is_stopped() or not self._expand(score, half):
                break
        parents = self.best(score, max(8, self._size // 20), refined=False)
        for _ in range(3 * count):
            if len(self._by_point) >= target or not parents or self._is_stopped():
                return
            self.add(self._child(parents, rng), "evolved")

    def refine(self, count: int, score: Score, rng: Random) -> None:
        """Price up to ``count`` refinements of good plans; better plans are refined more often."""
        best = self.best(score, max(8, self._size // 20))
        for _ in range(count if best else 0):
            if self._is_stopped():
                return
            parent = _good_one(best, rng)
            plan = self._refinement.draw(parent.plan, rng)
            if plan is not None:
                self._add_refined(parent.genome, plan)

    def trim(self, keep: int, score: Score, always: Iterable[str]) -> None:
        """Discard all but the best ``keep`` candidates and those with signatures in ``always``."""
        if len(self.candidates) <= 2 * keep:
            return
        kept = {candidate.signature for candidate in self.best(score, keep)} | set(always)
        self.candidates = {name: one for name, one in self.candidates.items() if name in kept}

    def best(self, score: Score, count: int, refined: bool = True) -> list[Candidate]:
        """The best ``count`` candidates, best first; ``refined`` includes refinements of points."""
        everyone = [one for one in self.candidates.values() if refined or not one.refined]
        if not everyone:
            return []
        return [everyone[index] for index in numpy.argsort(score(everyone), kind="stable")[:count]]

    def _expand(self, score: Score, until: int) -> bool:
        """Add neighbours of the best candidate that has not been expanded; returns False if there is none."""
        best = next((one for one in self.best(score, 16, refined=False) if one.signature not in self._expanded), None)
        if best is None:
            return False
        self._expanded.add(best.signature)
        for genome in islice(self.space.neighbours(best.genome), _MAX_NEIGHBOURS):
            self.add(genome, "neighbour")
            if len(self._by_point) >= until or self._is_stopped():
                self._expanded.discard(best.signature)
                break
        return True

    def _child(self, parents: Sequence[Candidate], rng: Random) -> dict[str, Value]:
        """A mutation of a good parent, or of a crossover of two good parents."""
        genome = _good_one(parents, rng).genome
        if rng.random() < 0.5:
            genome = self.space.crossover(genome, _good_one(parents, rng).genome, rng)
        return self.space.mutate(genome, rng, rng.choice((0.02, 0.08, 0.2)))


def _good_one(ordered: Sequence[Candidate], rng: Random) -> Candidate:
    """A random one of ``ordered`` candidates (best first), more likely a better one."""
    return ordered[min(rng.randrange(len(ordered)), rng.randrange(len(ordered)))]
