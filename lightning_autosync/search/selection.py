"""`rank_plans`: the plans that the replay predicts to be the fastest, found within a given time and without a trial."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from random import Random
from statistics import median
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan import SEMANTICS, Semantics, SyncPlan, builders, compile_plan
from lightning_autosync.plan.builders.default import (
    DDP_BUCKET,
    DDP_BUCKETS,
    LINK_BUCKET,
    NATIVE,
    SEARCHED,
    is_native,
    link_method,
    native_name,
    native_sizes,
)
from lightning_autosync.plan.builders.grouping import MIB
from lightning_autosync.plan.builders.rows import place_rows, serve_rows
from lightning_autosync.plan.space import Block, Domain, Genome, PlanSpace
from lightning_autosync.plan.space.domains import JOIN
from lightning_autosync.plan.topologies import method as find_method
from lightning_autosync.replay import Constants, Prediction, Replay, synchronization_bound, warm_up
from lightning_autosync.search.features import Floats, squared_distance
from lightning_autosync.search.population import Candidate, Population
from lightning_autosync.workload import Workload

_POPULATION = 96
_GROWN, _REFINED = 24, 12
"""New points and refinements of a generation."""
_SIMULATED = 4
"""Candidates of a generation whose frames are simulated."""
_SEARCHING = 0.8
"""Share of the time for the search; in the rest, the plans that it found are predicted once more."""
_LEAST_GENERATIONS = 9
"""Generations before a search may end early."""
_GAIN = 0.003
"""A search ends early if it has improved by less than this share in the last third of its generations."""
_DISTANCE = 0.1
"""Squared distance of the features from which two plans count as different."""

_SIZES: tuple[dict[str, int], ...] = ({}, {"bucket_bytes": LINK_BUCKET})
"""Sizes of messages with which each builder is tried, the first its own."""

_NATIVE_SIZES = {
    DDP_BUCKETS: {"bucket_bytes": DDP_BUCKET},
    **{f"{size} MiB": {"bucket_bytes": size * MIB, "first_bucket_bytes": size * MIB} for size in (1, 5, 100)},
}
"""Sizes of DDP's buckets that are always proposed. Which is best depends on the computation, and on what each message
costs the hosts."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class PredictedPlan:
    """A plan with its prediction.

    Attributes:
        seconds: predicted seconds of a step; NaN if the rates of the links are unknown.
        origin: name of the plan's builder, or ``search``.
        balanced: the same with a computation that lasts as long as gradients need on the links, if the workload has
            none; None if there was no time to predict it, or if it was not asked for.
        busy: utilization of the cores in that step (see `Prediction.busy`); 0 if ``balanced`` was not predicted beside
            an assumed computation.
    """

    plan: SyncPlan
    seconds: float
    origin: str
    balanced: float | None
    busy: float = 0.0


def rank_plans(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    constants: Constants | None = None,
    seconds: float = 10.0,
    keep: int = 8,
    bucket_bytes: int | None = None,
    compression: bool = False,
    exclude: Collection[str] = (),
    native_only: bool = False,
    overlaps: bool = False,
    balances: bool = True,
    known: Sequence[tuple[str, SyncPlan]] = (),
    seed: int = 0,
    clock: Clock = time.monotonic,
) -> list[PredictedPlan]:
    """The plans that are predicted to be the fastest, fastest first, each different from the others.

    They always include DDP's plan, the default's native all-reduce, and the fastest plan of a builder, even if these
    resemble faster plans. Where nothing can be chosen (one rank) or predicted (unknown rates of links), DDP's plan is
    the only one. Row-wise variables never take the backend's exchange of rows; see `place_rows`.

    The search ends early once it stops improving. It runs longer than ``seconds`` by at most the pricing of one
    plan, or by the default plans, which are at most six, if these alone take longer. Loading the replay's code does
    not count; see `warm_up`. The result is the same in every process for equal arguments, unless the clock ends the
    search.

    Args:
        workload: the variables and the times of a step.
        constants: constants of the hosts; None takes the defaults.
        seconds: most seconds of the search.
        keep: most plans; the plans that are always included may exceed it.
        bucket_bytes: bytes of a fused message; None leaves sizes to builders and search.
        compression: whether compressed plans may be proposed.
        exclude: topologies that no message may use, such as ``shared_memory`` if the ranks cannot share memory.
        native_only: whether dense messages may use only the backend's collectives, two-level ones included, as on GPUs.
        overlaps: whether steps overlap with the next forward pass (``overlap="step"``), and are predicted so. A
            workload without computation is then taken to compute as long as gradients need on the links.
        balances: whether to predict ``balanced``; without it, the search has all the time.
        known: names and plans of the same model that are always included, if they suit the cluster and the job, and if
            there is time to price them.
        seed: seed of all random draws.
        clock: gives seconds.

    Raises:
        PlanError: ``exclude`` contains ``native``.
    """
    costs = constants or Constants()
    searches = cluster.world_size > 1 and cluster.measured
    if searches:
        warm_up()
        if overlaps:
            bound = synchronization_bound(workload, cluster, costs.framing, costs.burst)
            workload = _balanced(workload, cluster, bound)
    assumes = balances and searches and not _computes(workload)
    budget = _Budget(clock, _SEARCHING * seconds if assumes else seconds)
    space = _SelectionSpace(
        workload, cluster, "compressed" if compression else "exact", exclude, native_only, bucket_bytes
    )
    population = Population(space, costs, _POPULATION, native_only, budget.is_spent, overlaps)
    found = _Selection(space, population, budget, keep, Random(seed), known).run(searches)
    if assumes:
        left = _Budget(clock, budget.begun + seconds - clock())
        return _beside_computation(found, workload, cluster, costs, native_only, left)
    return [replace(each, balanced=each.seconds) for each in found] if balances else found


def _beside_computation(
    found: list[PredictedPlan],
    workload: Workload,
    cluster: ClusterSpec,
    costs: Constants,
    native_only: bool,
    budget: _Budget,
) -> list[PredictedPlan]:
    """The plans with the predicted time of a step whose computation lasts as long as the fastest plan needs.

    Plans for which there is no time have none. Native plans come first: DDP's is one of them, and the others are
    compared with it.
    """
    workload = _balanced(workload, cluster, found[0].seconds)
    replay, steps = Replay(workload, cluster, costs), dict[int, Prediction]()
    for place in sorted(range(len(found)), key=lambda place: not is_native(found[place].origin)):
        if budget.is_spent():
            break
        schedule = compile_plan(found[place].plan, workload, cluster, two_level_collectives=native_only)
        steps[place] = replay.predict(schedule)
    return [
        replace(each, balanced=steps[place].step_time, busy=steps[place].busy) if place in steps else each
        for place, each in enumerate(found)
    ]


def _computes(workload: Workload) -> bool:
    return workload.forward_time + workload.backward_time > 0


def _balanced(workload: Workload, cluster: ClusterSpec, seconds: float) -> Workload:
    """The workload; if its computation is unknown, that is taken to last so many seconds, on the slowest node.

    A job chooses its first plan before it knows its computation. Without any, no message could travel beside it. The
    backward pass takes two thirds of the time.
    """
    if _computes(workload):
        return workload
    passes = seconds * min(node.speed for node in cluster.nodes)
    return workload.model_copy(update={"forward_time": passes / 3, "backward_time": 2 * passes / 3})


class _Budget:
    """The time of a search, from ``begun``."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._last = self.begun = clock()
        self._end = self._last + seconds

    def is_spent(self) -> bool:
        """Whether as much work as since the last call would exceed the time."""
        last, self._last = self._last, self._clock()
        return 2 * self._last - last >= self._end


class _SelectionSpace(PlanSpace):
    """The composed plans that a job may use.

    Args:
        workload, cluster, semantics: as for `PlanSpace`.
        exclude, native_only, bucket_bytes: as for `rank_plans`.

    Raises:
        PlanError: ``exclude`` contains ``native``.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        semantics: Semantics,
        exclude: Collection[str],
        native_only: bool,
        bucket_bytes: int | None,
    ) -> None:
        if "native" in exclude:
            raise PlanError("exclude: 'native' cannot be excluded")
        self._exclude = exclude
        self._native_only = native_only
        self._bucket_bytes = bucket_bytes
        # Two-level collectives need equal places, and sums that the backend can make.
        even = len({len(ranks) for ranks in cluster.localities()}) == 1
        self._collectives = ("native", "hierarchical") if even and semantics == "exact" else ("native",)
        super().__init__(workload, cluster, semantics)

    @property
    def sizes_are_free(self) -> bool:
        """Whether the user left the sizes of messages to builders and search."""
        return self._bucket_bytes is None

    def plan(self, genome: Genome) -> SyncPlan:
        return serve_rows(super().plan(genome), self.workload)

    def built(self, name: str, **arguments: Any) -> SyncPlan:
        """The plan of a builder, with ``arguments`` as far as it takes them; a size that the user stated goes first.

        Raises:
            PlanError: the builder refuses, or jobs may not use its plan.
        """
        if self._bucket_bytes is not None:
            arguments["bucket_bytes"] = self._bucket_bytes
        taken = inspect.signature(builders.find(name)).parameters.keys() & arguments.keys()
        plan = builders.build(name, self.workload, self.cluster, **{key: arguments[key] for key in taken})
        return self.checked(f"builder '{name}'", place_rows(plan, self.workload, self.cluster))

    def checked(self, name: str, plan: SyncPlan) -> SyncPlan:
        """The plan.

        Raises:
            PlanError: jobs may not use it.
        """
        if SEMANTICS.index(plan.semantics) > SEMANTICS.index(self.semantics):
            raise PlanError(f"{name}: its plan is {plan.semantics}; allowed: {self.semantics}")
        for group in plan.groups:
            if not self._allows(group.topology, self.workload.variable(group.variables[0]).kind == "dense"):
                raise PlanError(f"{name}: topology '{group.topology}' is not allowed")
        return plan

    @cached_property
    def _builders(self) -> tuple[str, ...]:
        return ()  # they take part by `built`, each when there is time

    def _domains_of(self, block: Block) -> dict[str, Domain]:
        if self._native_only and not block.dense:
            return {}  # `plan` serves its rows
        domains = super()._domains_of(block)
        domains["method"] = tuple(
            name
            for name in domains.get("method", ("native",))
            if name == JOIN or self._allows(find_method(str(name))[0].name, block.dense)
        )
        if self._bucket_bytes is not None:
            domains["bucket"] = (self._bucket_bytes,)
        return domains

    def _allows(self, topology: str, dense: bool) -> bool:
        return topology not in self._exclude and not (self._native_only and dense and topology not in self._collectives)


class _Selection:
    """Finds and compares candidates."""

    def __init__(
        self,
        space: _SelectionSpace,
        population: Population,
        budget: _Budget,
        keep: int,
        rng: Random,
        known: Sequence[tuple[str, SyncPlan]],
    ) -> None:
        self._space = space
        self._known = known
        self._population = population
        self._budget = budget
        self._keep = keep
        self._rng = rng
        self._simulated: dict[str, float] = {}
        self._shift = 0.0
        self._always: set[str] = set()
        self._builders: dict[str, str] = {}

    def run(self, searches: bool) -> list[PredictedPlan]:
        """The plans that a job takes without a search, and those of a search if there is one; see `result`."""
        self.add_defaults()
        if searches:
            self.search()
        return self.result()

    def add_defaults(self) -> None:
        """Add the plans that a job takes without a search, whatever time that takes."""
        space, workload, cluster = self._space, self._space.workload, self._space.cluster
        native: dict[str, dict[str, Any]] = {NATIVE: {}}
        if cluster.world_size > 1 and cluster.measured:
            self._try_built(link_method(workload, cluster).build.__name__, bucket_bytes=LINK_BUCKET)
            costs = self._population.constants
            native[NATIVE] = native_sizes(cluster, costs.shared_host_cost(cluster.world_size))
            if space.sizes_are_free:
                native |= {native_name(each): sizes for each, sizes in _NATIVE_SIZES.items()}
        for name, sizes in native.items():
            plan = space.built(NATIVE, **sizes)
            self._always.add(self._add_built(name, plan).signature)
        for one in list(self._population.candidates.values()):
            self._simulate(one)

    def search(self) -> None:
        """Add known plans, builders' and generations of better ones, until the time is spent or nothing improves."""
        for name, plan in self._known:
            if self._budget.is_spent():
                return
            with suppress(DocumentError):
                self._always.add(self._add_built(name, self._space.checked(name, plan)).signature)
        for name, sizes in product(builders.names(), _SIZES):
            if self._budget.is_spent():
                return
            self._try_built(name, **sizes)
        self._population.start(self._rng)
        bests: list[float] = []
        while not _is_settled(bests) and not self._budget.is_spent():
            for one in self._promising():
                if self._budget.is_spent():
                    return
                self._simulate(one)
            bests.append(min(map(self._estimate, filter(self._is_known, self._population.candidates.values()))))
            self._population.grow(_GROWN, self._score, self._rng)
            if self._space.sizes_are_free:
                self._population.refine(_REFINED, self._score, self._rng)

    def result(self) -> list[PredictedPlan]:
        """The fastest different candidates whose prices are the replay's best, fastest first."""
        known = [one for one in self._population.candidates.values() if self._is_known(one)]
        measured = self._space.cluster.measured
        return [
            PredictedPlan(
                one.plan,
                math.exp(self._estimate(one)) if measured else math.nan,
                self._builders.get(one.signature, SEARCHED),
                None,
            )
            for one in self._different(known)
        ]

    def _try_built(self, name: str, **arguments: Any) -> None:
        """Add a builder's plan if the cluster and the job allow it."""
        with suppress(DocumentError):
            self._add_built(name, self._space.built(name, **arguments))

    def _add_built(self, name: str, plan: SyncPlan) -> Candidate:
        candidate = self._population.add_plan(plan, name)
        if candidate is None:
            raise PlanError(f"builder '{name}': its plan does not compile for cluster '{self._space.cluster.name}'")
        self._builders.setdefault(candidate.signature, name)
        return candidate

    def _simulate(self, candidate: Candidate) -> None:
        """Price a candidate as well as the replay can, and the offset of rough prices from such prices."""
        if not self._is_known(candidate):
            self._simulated[candidate.signature] = self._population.precise(candidate)
            everyone = self._population.candidates
            self._shift = median(price - everyone[name].rough for name, price in self._simulated.items())

    def _promising(self) -> list[Candidate]:
        """Candidates that the result would contain if their rough prices were right; else the best of all others."""
        everyone = list(self._population.candidates.values())
        new = [one for one in self._different(everyone) if not self._is_known(one)]
        if not new:
            ordered = self._population.best(self._score, len(everyone))
            new = [one for one in ordered if not self._is_known(one)]
        return new[:_SIMULATED]

    def _different(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The fastest candidates that differ from each other, and those that always take part, fastest first."""
        if not candidates:
            return []
        score = self._score(candidates)
        order = numpy.argsort(score, kind="stable").tolist()
        built = next((place for place in order if candidates[place].signature in self._builders), None)
        always = {place for place in order if place == built or candidates[place].signature in self._always}
        features = numpy.array([one.features for one in candidates])
        distances = squared_distance(features, features[sorted(always)]).min(axis=1, initial=numpy.inf)
        taken: list[int] = []
        room = max(1, self._keep - len(always))
        for place in order:
            if place not in always:
                if room == 0 or (taken and distances[place] < _DISTANCE):
                    continue
                room -= 1
                distances = numpy.minimum(distances, squared_distance(features, features[place : place + 1])[:, 0])
            taken.append(place)
        return [candidates[place] for place in taken]

    def _is_known(self, candidate: Candidate) -> bool:
        return candidate.is_precise or candidate.signature in self._simulated

    def _estimate(self, candidate: Candidate) -> float:
        """Logarithm of a step's seconds."""
        if candidate.is_precise:
            return candidate.rough
        return self._simulated.get(candidate.signature, candidate.rough + self._shift)

    def _score(self, candidates: Sequence[Candidate]) -> Floats:
        return numpy.array([self._estimate(one) for one in candidates])


def _is_settled(bests: Sequence[float]) -> bool:
    """Whether the last third of the generations gained too little; ``bests`` are logarithms of seconds."""
    return len(bests) >= _LEAST_GENERATIONS and bests[2 * len(bests) // 3 - 1] - bests[-1] < _GAIN
