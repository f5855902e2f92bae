"""Candidates: points of a space with their plans, priced roughly, and bred for low prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy

from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan, compile_plan, signature
from lightning_autosync.plan.space import Genome, PlanSpace, Refinement, Value
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.search.sampler.features import Embedding, Floats
from lightning_autosync.search.sampler.observations import Choice
from lightning_autosync.search.tried import BUILT, refined_plan

Score = Callable[[Sequence["Candidate"]], Floats]
"""Logarithms of seconds that candidates are believed to take, or any other number that is lower for better ones."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A point that may be proposed.

    Attributes:
        genome: the point, in its normal form.
        origin: how it came about.
        plan: what it stands for.
        signature: of the plan; points with the same one do the same.
        features: of the plan.
        rough: logarithm of the seconds of a step in which messages flow as a whole, as the replay prices it; 0 where
            the rates of the links are unknown.
        refined: whether the plan refines the point and is not the point's own.
    """

    genome: Mapping[str, Value]
    origin: str
    plan: SyncPlan
    signature: str
    features: Floats
    rough: float
    refined: bool = False


class Population:
    """The candidates of one space; what does not compile never becomes one.

    Args:
        space: whose points are bred.
        constants: of the hosts, for the replay.
        size: points that are priced before the first proposal; half of them are founders.
    """

    def __init__(self, space: PlanSpace, constants: Constants, size: int) -> None:
        self.space = space
        self.candidates: dict[str, Candidate] = {}
        self._size = size
        self._names = tuple(space.parameters)
        self._known: dict[tuple[Value, ...], Candidate | None] = {}
        self._expanded: set[str] = set()
        self._replay = Replay(space.workload, space.cluster, constants) if space.cluster.measured else None
        self._embedding = Embedding(space.workload)
        self._refinement = Refinement(space.workload, space.cluster)
        self._documents: dict[str, Candidate | None] = {}

    def of(self, choice: Choice) -> Candidate | None:
        """The candidate that a trial tries; None if there is none, as for a plan that does not compile."""
        if choice.refined is None:
            return self.add(choice.point, "measured")
        if choice.refined not in self._documents:
            try:
                plan = refined_plan(choice.refined)
            except DocumentError:
                self._documents[choice.refined] = None
            else:
                self._documents[choice.refined] = self._refined(self.space.normal(choice.point), plan)
        return self._documents[choice.refined]

    def add(self, genome: Genome, origin: str) -> Candidate | None:
        """The candidate of a point; None if its plan does not compile."""
        point = self.space.normal(genome)
        key = tuple(point[name] for name in self._names)
        if key not in self._known:
            made = self._make(point, origin)
            if made is not None:
                there = self.candidates.get(made.signature)
                # A point's own plan goes before one that came about as a refinement: it can be a parent, and be given.
                made = made if there is None or there.refined else there
                self.candidates[made.signature] = made
            self._known[key] = made
        return self._known[key]

    def refine(self, count: int, score: Score, rng: Random) -> None:
        """Price up to ``count`` plans that refine the best ones; the better, the more."""
        best = self._best(score, max(8, self._size // 20))
        for _ in range(count if best else 0):
            parent = best[min(rng.randrange(len(best)), rng.randrange(len(best)))]
            plan = self._refinement.draw(parent.plan, rng)
            if plan is not None:
                self._refined(parent.genome, plan)

    def found(self, rng: Random, seeds: Iterable[Genome] = ()) -> None:
        """What evolution begins with: builders, what is carried over, coherent points, and draws."""
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
        """Price up to ``count`` new points: half of them neighbours of the best ones, the others their children."""
        target = len(self._known) + count
        half = len(self._known) + count // 2
        for _ in range(count):
            if len(self._known) >= half or not self._expand(score, half):
                break
        parents = self._best(score, max(8, self._size // 20), refined=False)
        for _ in range(3 * count):
            if len(self._known) >= target or not parents:
                return
            self.add(self._child(parents, rng), "evolved")

    def trim(self, keep: int, score: Score, always: Iterable[str]) -> None:
        """Forget all but the best ``keep`` candidates and those with the given signatures."""
        if len(self.candidates) <= 2 * keep:
            return
        kept = {candidate.signature for candidate in self._best(score, keep)} | set(always)
        self.candidates = {name: one for name, one in self.candidates.items() if name in kept}

    def _make(self, point: dict[str, Value], origin: str) -> Candidate | None:
        try:
            return self._priced(point, origin, self.space.plan(point))
        except DocumentError:
            return None

    def _refined(self, point: Mapping[str, Value], plan: SyncPlan) -> Candidate | None:
        """The candidate of a plan that refines a point; one that does the same may be there already."""
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
        return Candidate(point, origin, plan, signature(plan), self._embedding(plan), rough)

    def _expand(self, score: Score, until: int) -> bool:
        """Add the neighbours of the best candidate whose neighbours are not there yet; False if there is none."""
        best = next((one for one in self._best(score, 16, refined=False) if one.signature not in self._expanded), None)
        if best is None:
            return False
        self._expanded.add(best.signature)
        for genome in self._neighbours(best):
            self.add(genome, "neighbour")
            if len(self._known) >= until:
                self._expanded.discard(best.signature)
                break
        return True

    def _neighbours(self, candidate: Candidate) -> Iterator[dict[str, Value]]:
        return islice(self.space.neighbours(candidate.genome), 200)

    def _best(self, score: Score, count: int, refined: bool = True) -> list[Candidate]:
        """The best candidates; points alone, if not ``refined`` ones too, which have the points of others."""
        everyone = [one for one in self.candidates.values() if refined or not one.refined]
        if not everyone:
            return []
        return [everyone[index] for index in numpy.argsort(score(everyone), kind="stable")[:count]]

    def _child(self, parents: Sequence[Candidate], rng: Random) -> dict[str, Value]:
        """A mutant of a good parent, or of what two of them have between them; the better, the more children."""

        def parent() -> Genome:
            return parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))].genome

        genome = parent()
        if rng.random() < 0.5:
            genome = self.space.crossover(genome, parent(), rng)
        return self.space.mutate(genome, rng, rng.choice((0.02, 0.08, 0.2)))
