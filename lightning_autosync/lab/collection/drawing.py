"""Draws what a collection measures: workloads on clusters, and plans of several kinds, priced by the replay."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, product
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, synchronization_rate
from lightning_autosync.documents import canonical
from lightning_autosync.errors import DocumentError, WorkloadError
from lightning_autosync.lab.collection.settings import CollectionSettings, Mixture, Range
from lightning_autosync.lab.validation.cases import BUILDERS, draw_buckets, draw_built, draw_free
from lightning_autosync.learned.dataset import sample_key
from lightning_autosync.measure.emulation.network import emulable
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.space import BUILDER, Genome, PlanSpace
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute

_BATCH = {"batch_size": 8}


@dataclass(frozen=True)
class Combination:
    """A workload on a cluster, and the number of plans to draw for it."""

    workload: Workload
    cluster: ClusterSpec
    plans: int

    @property
    def name(self) -> str:
        """A readable name of workload and cluster."""
        return f"{self.workload.name} on {self.cluster.name}"


def draw_combinations(settings: CollectionSettings) -> list[Combination]:
    """Every workload on every cluster, cluster by cluster; only the first ones if there are fewer pairs to draw.

    Raises:
        ClusterError: a cluster does not exist.
        WorkloadError: a model does not exist.
        DocumentError: two clusters or two families have the same name.
    """
    clusters = [scaled_cluster(name, settings.rate, settings.fastest_link) for name in settings.clusters]
    workloads = [
        draw_workload(settings, model, variant) for model in settings.families for variant in range(settings.variants)
    ]
    _check_names("clusters", [cluster.name for cluster in clusters])
    _check_names("families", [workload.name for workload in workloads])
    places = list(product(clusters, workloads))
    found = [
        Combination(workload, cluster, settings.pairs // len(places) + (number < settings.pairs % len(places)))
        for number, (cluster, workload) in enumerate(places)
    ]
    return [combination for combination in found if combination.plans]


def scaled_cluster(cluster: str | dict[str, Any], rate: float, fastest: float) -> ClusterSpec:
    """A cluster scaled to a rate of synchronization, as far as ``fastest`` (bytes/s of a link) allows; as emulated.

    So a workload takes a similar time on all clusters, which then differ only in shape.
    """
    named = cluster if isinstance(cluster, str) else ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **cluster})
    shape = emulable(resolve_cluster(named), math.inf)
    if not shape.links:
        return shape
    return emulable(shape.scaled(rate / synchronization_rate(shape)), fastest)


def draw_workload(settings: CollectionSettings, model: str | dict[str, Any], variant: int) -> Workload:
    """A model of the catalogue with a random size and a random share of computation."""
    arguments = {"family": model} if isinstance(model, str) else dict(model)
    family = arguments.pop("family", None)
    if not isinstance(family, str):
        raise WorkloadError(f"families: {model}: family: missing; allowed: {', '.join(catalogue.names())}")
    name = f"{arguments.pop('name', family)}-{variant}"
    random = Random(f"{settings.seed} {name}")
    size, ratio = _draw(random, settings.bytes), _draw(random, settings.ratio)
    full = without_light(catalogue.build(family, **_BATCH | arguments), settings.lightest)
    workload = with_compute(scaled(full, size / full.bytes), ratio * size / settings.rate)
    return workload.model_copy(update={"name": name})


def without_light(workload: Workload, share: float) -> Workload:
    """The workload without dense variables that have less than ``share`` of all bytes."""
    least = share * workload.bytes
    kept = [variable for variable in workload.variables if variable.kind != "dense" or variable.bytes >= least]
    return workload.model_copy(update={"variables": tuple(kept)})


def _draw(random: Random, limits: Range) -> float:
    """A log-uniform value between both limits."""
    least, most = limits
    return math.exp(random.uniform(math.log(least), math.log(most)))


def _check_names(field: str, names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DocumentError(f"{field}: '{name}' occurs {count} times; give each entry a different 'name'")


_FOUNDERS = 24
_PARENTS = 8
_CHILDREN = 3
"""Number of children for each wanted point."""
_CROSSOVER = 0.3


def evolve(space: PlanSpace, price: Callable[[SyncPlan], float], random: Random, count: int) -> list[Genome]:
    """At most ``count`` distinct points from an evolutionary search: half of them the best, half random others.

    Args:
        price: predicts the seconds of a step.
    """
    found: dict[tuple[object, ...], tuple[float, Genome]] = {}

    def meet(point: Genome) -> None:
        name = tuple(point.values())
        if name not in found:
            found[name] = price(space.plan(point)), point

    for point in [*space.baselines(), *(space.draw(random) for _ in range(_FOUNDERS))]:
        meet(point)
    founders = len(found)
    for _ in range(_CHILDREN * count):
        parents = sorted(found.values(), key=lambda one: one[0])[:_PARENTS]
        meet(_child(space, [point for _, point in parents], random))
    children = list(found.values())[founders:]
    children.sort(key=lambda one: one[0])
    best = [point for _, point in children[: (count + 1) // 2]]
    passed = [point for _, point in children[(count + 1) // 2 :]]
    return best + random.sample(passed, min(count - len(best), len(passed)))


def _child(space: PlanSpace, parents: list[Genome], random: Random) -> Genome:
    if random.random() < _CROSSOVER:
        one, other = random.sample(parents, 2)
        crossed = space.crossover(one, other, random)
        if crossed not in (one, other):
            return crossed
    return space.mutate(random.choice(parents), random)


REFERENCE = "reference"
_TRIES = 12
"""Maximum number of draws for each wanted plan. Most draws repeat earlier plans."""
_REFUSALS = 2
"""Number of a builder's plans refused for their price after which it is skipped. The best builder is never refused."""


@dataclass(frozen=True)
class DrawnPlan:
    """A plan to measure.

    Attributes:
        kind: how the plan was drawn.
        text: plan as canonical JSON, which needs far less memory than a `SyncPlan`.
        replayed: seconds of a step, as predicted by the replay.
    """

    key: str
    kind: str
    text: str
    replayed: float

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return dict(json.loads(self.text))


def draw_plans(settings: CollectionSettings, constants: Constants, combination: Combination) -> list[DrawnPlan]:
    """The plans of a combination: first the reference plan, then the others in random order.

    The same settings draw the same plans. There are fewer than requested if the space has no more.
    """
    return _Drawer(settings, constants, combination).draw()


def kinds(random: Random, mixture: Mixture, count: int) -> list[str]:
    """A kind for each of ``count`` plans, in the proportions of the mixture, shuffled."""
    shares = dict(mixture)
    drawn: dict[str, int] = dict.fromkeys(shares, 0)
    for _ in range(count):
        # The kind that is furthest behind its share is next.
        following = min((kind for kind in shares if shares[kind]), key=lambda kind: (drawn[kind] + 1) / shares[kind])
        drawn[following] += 1
    made = list(chain.from_iterable([kind] * number for kind, number in drawn.items()))
    random.shuffle(made)
    return made


class _Drawer:
    """Draws for one combination."""

    def __init__(self, settings: CollectionSettings, constants: Constants, combination: Combination) -> None:
        self._settings = settings
        self._combination = combination
        self._random = Random(f"{settings.seed} {combination.workload.name} {combination.cluster.name}")
        self._replay = Replay(combination.workload, combination.cluster, constants)
        self._known: dict[str, DrawnPlan] = {}
        self._prices: dict[str, float] = {}
        self._refused: Counter[str] = Counter()
        self._best = math.inf

    def draw(self) -> list[DrawnPlan]:
        combination = self._combination
        wanted = kinds(self._random, self._settings.mixture, combination.plans - 1)
        sources = self._sources(wanted.count("evolved"))
        self._take(REFERENCE, builders.all_reduce(combination.workload, combination.cluster), slowest=math.inf)
        for kind in wanted:
            self._add(kind, sources[kind])
        return list(self._known.values())

    def _sources(self, evolved: int) -> dict[str, Iterator[tuple[str, SyncPlan]]]:
        workload, cluster = self._combination.workload, self._combination.cluster
        return {
            "buckets": self._repeat("buckets", lambda: draw_buckets(self._random, workload, cluster)),
            "built": chain(self._defaults(), self._built()),
            "free": self._repeat("free", lambda: draw_free(self._random, workload, cluster)),
            "drawn": self._repeat("drawn", self._point),
            "evolved": chain(self._evolve(evolved), self._repeat("drawn", self._point)),
        }

    def _add(self, kind: str, source: Iterator[tuple[str, SyncPlan]]) -> None:
        """Add a plan of that kind that is new and not too slow, else a random point of the space."""
        for drawn in islice(source, _TRIES):
            if self._take(*drawn):
                return
        for _ in range(_TRIES):
            if self._take("drawn", self._point()):
                return

    def _take(self, kind: str, plan: SyncPlan, slowest: float | None = None) -> bool:
        text = canonical(plan.to_dict())
        if text in self._known or (slowest is None and len(plan.groups) > self._settings.messages):
            return False
        price = self._price(plan, text)
        if price > (slowest or self._settings.slowest) * self._best:
            self._refused[kind] += 1
            return False
        combination = self._combination
        key = sample_key(combination.cluster.fingerprint, combination.workload.fingerprint, text)
        self._known[text] = DrawnPlan(key, kind, text, price)
        return True

    def _coarse_price(self, plan: SyncPlan) -> float:
        """A fast prediction of a step's seconds by the fluid replay; infinite for a plan with too many messages."""
        if len(plan.groups) > self._settings.messages:
            return math.inf
        schedule = compile_plan(plan, self._combination.workload, self._combination.cluster)
        price = self._replay.predict(schedule, "fluid").step_time
        self._best = min(self._best, price)
        return price

    def _price(self, plan: SyncPlan, text: str) -> float:
        """Predicted seconds of a step; cached, since plans repeat and those with many messages take long to price."""
        if text not in self._prices:
            schedule = compile_plan(plan, self._combination.workload, self._combination.cluster)
            self._prices[text] = self._replay.predict(schedule).step_time
            self._best = min(self._best, self._prices[text])
        return self._prices[text]

    @cached_property
    def _space(self) -> PlanSpace:
        return PlanSpace(self._combination.workload, self._combination.cluster)

    def _point(self) -> SyncPlan:
        return self._space.plan(self._space.draw(self._random))

    def _defaults(self) -> Iterator[tuple[str, SyncPlan]]:
        """The builders' plans with default arguments."""
        for point in self._space.baselines():
            yield str(point[BUILDER]), self._space.plan(point)

    def _built(self) -> Iterator[tuple[str, SyncPlan]]:
        """Builders' plans with random arguments, without builders whose plans are repeatedly too slow here."""
        while any(self._refused[builder] < _REFUSALS for builder in BUILDERS):
            for builder in self._random.sample(BUILDERS, len(BUILDERS)):
                if self._refused[builder] < _REFUSALS:
                    plan = draw_built(self._random, self._combination.workload, self._combination.cluster, builder)
                    yield builder, plan

    def _evolve(self, count: int) -> list[tuple[str, SyncPlan]]:
        """Evolved points, computed before any plan is refused, since refusals depend on the best price."""
        points = evolve(self._space, self._coarse_price, self._random, count)
        return [("evolved", self._space.plan(point)) for point in points]

    @staticmethod
    def _repeat(kind: str, draw: Callable[[], SyncPlan]) -> Iterator[tuple[str, SyncPlan]]:
        while True:
            yield kind, draw()
