"""Plans for a workload on a cluster, drawn in several ways and priced by the replay."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from random import Random
from typing import Any

from lightning_autosync.documents import canonical
from lightning_autosync.lab.collection.combinations import Combination
from lightning_autosync.lab.collection.evolution import evolve
from lightning_autosync.lab.collection.settings import Mixture, Settings
from lightning_autosync.lab.validation.plans import BUILDERS, draw_buckets, draw_built, draw_free
from lightning_autosync.learned.dataset import sample_key
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.space import BUILDER, PlanSpace
from lightning_autosync.replay import Constants, Replay

REFERENCE = "reference"
_TRIES = 12
"""Draws for each plan that is wanted; most are lost to plans drawn before."""
_REFUSALS = 2
"""Of a builder's plans for their price; there is always one that is not refused, the best of all."""


@dataclass(frozen=True)
class Draft:
    """A plan to measure.

    Attributes:
        key: of the pair.
        kind: how it was drawn.
        text: the plan as canonical JSON, which is a small part of a `SyncPlan`'s memory.
        replayed: seconds of a step, as priced.
    """

    key: str
    kind: str
    text: str
    replayed: float

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return dict(json.loads(self.text))


def draw_drafts(settings: Settings, constants: Constants, combination: Combination) -> list[Draft]:
    """The plans of a combination in random order, but for the reference plan, which comes first.

    The same settings draw the same plans. There are fewer than asked for if the space has no more.
    """
    return _Drawer(settings, constants, combination).draw()


def kinds(random: Random, mixture: Mixture, count: int) -> list[str]:
    """A kind for each of ``count`` plans, in the proportions of the mixture, shuffled."""
    shares = dict(mixture)
    drawn: dict[str, int] = dict.fromkeys(shares, 0)
    for _ in range(count):
        # Whoever is furthest behind its share is next.
        following = min((kind for kind in shares if shares[kind]), key=lambda kind: (drawn[kind] + 1) / shares[kind])
        drawn[following] += 1
    made = list(chain.from_iterable([kind] * number for kind, number in drawn.items()))
    random.shuffle(made)
    return made


class _Drawer:
    """Draws for one combination."""

    def __init__(self, settings: Settings, constants: Constants, combination: Combination) -> None:
        self._settings = settings
        self._combination = combination
        self._random = Random(f"{settings.seed} {combination.workload.name} {combination.cluster.name}")
        self._replay = Replay(combination.workload, combination.cluster, constants)
        self._known: dict[str, Draft] = {}
        self._prices: dict[str, float] = {}
        self._refused: Counter[str] = Counter()
        self._best = math.inf

    def draw(self) -> list[Draft]:
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
        """One plan of that kind that is new and not too slow; a point of the space where there is none any more."""
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
        self._known[text] = Draft(key, kind, text, price)
        return True

    def _coarse_price(self, plan: SyncPlan) -> float:
        """Seconds of a step in little time: messages flow as a whole, and one of too many of them has no price."""
        if len(plan.groups) > self._settings.messages:
            return math.inf
        schedule = compile_plan(plan, self._combination.workload, self._combination.cluster)
        price = self._replay.predict(schedule, "fluid").step_time
        self._best = min(self._best, price)
        return price

    def _price(self, plan: SyncPlan, text: str) -> float:
        """Seconds of a step; the same plan may come again, and one of many messages takes long to price."""
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
        """What builders make of their own accord."""
        for point in self._space.baselines():
            yield str(point[BUILDER]), self._space.plan(point)

    def _built(self) -> Iterator[tuple[str, SyncPlan]]:
        """Of all builders in turn, but for those whose plans are too slow here again and again."""
        while any(self._refused[builder] < _REFUSALS for builder in BUILDERS):
            for builder in self._random.sample(BUILDERS, len(BUILDERS)):
                if self._refused[builder] < _REFUSALS:
                    plan = draw_built(self._random, self._combination.workload, self._combination.cluster, builder)
                    yield builder, plan

    def _evolve(self, count: int) -> list[tuple[str, SyncPlan]]:
        """Evolved at once, so that the best price is known before other plans are refused for theirs."""
        points = evolve(self._space, self._coarse_price, self._random, count)
        return [("evolved", self._space.plan(point)) for point in points]

    @staticmethod
    def _repeat(kind: str, draw: Callable[[], SyncPlan]) -> Iterator[tuple[str, SyncPlan]]:
        while True:
            yield kind, draw()
