"""Candidates: points of a space with their plans and rough prices, evolved towards low prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy

from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan, compile_plan, signature
from lightning_autosync.plan.space import Genome, PlanSpace, Refinement, Value
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.search.sampler.features import Floats, PlanFeatures
from lightning_autosync.search.sampler.observations import Choice
from lightning_autosync.search.trial_attributes import BUILT, refined_plan

Score = Callable[[Sequence["Candidate"]], Floats]
"""Maps n candidates to [n] numbers, lower for better candidates, such as logarithms of estimated seconds."""
_MAX_NEIGHBOURS = 200


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that may be proposed.

    Attributes:
        genome: point of the plan, in normal form.
        origin: how the candidate was generated.
        plan: plan to measure.
        signature: signature of the plan. Plans with the same signature do the same.
        features: [features] feature vector of the plan.
        rough: logarithm of a step's seconds by a fluid replay, in which messages flow as a whole; 0 if the rates of the
            links are unknown.
        refined: whether the plan refines the point instead of being the point's own plan.
    """

    genome: Mapping[str, Value]
    origin: str
    plan: SyncPlan
    signature: str
    features: Floats
    rough: float
    refined: bool = False


class Population:
    """The candidates of one space. A plan that does not compile never becomes a candidate.

    Args:
        space: space of the points.
        constants: constants of the hosts, for the replay.
        size: number of points to price before the first proposal; half of them are the first generation.
    """

    def __init__(self, space: PlanSpace, constants: Constants, size: int) -> None:
        self.space = space
        self.candidates: dict[str, Candidate] = {}
        self._size = size
        self._names = tuple(space.parameters)
        self._by_point: dict[tuple[Value, ...], Candidate | None] = {}
        self._by_document: dict[str, Candidate | None] = {}
        self._expanded: set[str] = set()
        self._replay = Replay(space.workload, space.cluster, constants) if space.cluster.measured else None
        self._features = PlanFeatures(space.workload)
        self._refinement = Refinement(space.workload, space.cluster)

    def of(self, choice: Choice) -> Candidate | None:
        """The candidate of a trial's choice; None if its plan does not compile."""
        if choice.refined is None:
            return self.add(choice.point, "measured")
        if choice.refined not in self._by_document:
            try:
                plan = refined_plan(choice.refined)
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

    def _add_refined(self, point: Mapping[str, Value], plan: SyncPlan) -> Candidate | None:
        """The candidate of a plan that refines a point, or an existing candidate with the same signature."""
        name = signature(plan)
        if name not in self.candidates:
            try:
                self.candidates[name] = replace(self._priced(point, "refined", plan), refined=True)
            except DocumentError:
                return None
        return self.candidates[name]

    def _priced(self, point: Mapping[str, Value], origin: str, plan: SyncPlan) -> Candidate:
        schedule = compile_plan(plan, self.space.workload, self.space.cluster)
        rough = math.log(self._replay.predict(schedule, "fluid").step_time) if self._replay else 0.0
        return Candidate(point, origin, plan, signature(plan), self._features(plan), rough)

    def start(self, rng: Random, seeds: Iterable[Genome] = ()) -> None:
        """The first generation: transferred ``seeds``, builders, points that treat all blocks alike, random points."""
        for genome in seeds:
            self.add(genome, "transferred")
        for genome in self.space.baselines():
            self.add(genome, BUILT)
        coherent = list(self.space.coherent())
        for genome in rng.sample(coherent, min(len(coherent), self._size // 4)):
            self.add(genome, "coherent")
        for _ in range(self._size // 4):
            self.add(self.space.draw(rng), "drawn")

    def grow(self, count: int, score: Score, rng: Random) -> None:
        """Price up to ``count`` new points: half of them neighbours, the others children of the best points."""
        target = len(self._by_point) + count
        half = len(self._by_point) + count // 2
        for _ in range(count):
            if len(self._by_point) >= half or not self._expand(score, half):
                break
        parents = self.best(score, max(8, self._size // 20), refined=False)
        for _ in range(3 * count):
            if len(self._by_point) >= target or not parents:
                return
            self.add(self._child(parents, rng), "evolved")

    def refine(self, count: int, score: Score, rng: Random) -> None:
        """Price up to ``count`` refinements of good plans; better plans are refined more often."""
        best = self.best(score, max(8, self._size // 20))
        for _ in range(count if best else 0):
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
            if len(self._by_point) >= until:
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
