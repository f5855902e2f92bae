"""Good points of a plan space, found by evolution with a price in place of a measurement."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import Genome, PlanSpace

_FOUNDERS = 24
_PARENTS = 8
_CHILDREN = 3
"""For each point that is wanted."""
_CROSSOVER = 0.3


def evolve(space: PlanSpace, price: Callable[[SyncPlan], float], random: Random, count: int) -> list[Genome]:
    """At most ``count`` different points: half of them the best, half from what was passed on the way to them.

    Args:
        space: of the points.
        price: seconds of a step.
        random: decides.
        count: how many are wanted.
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
