"""How much each member of a group counts in its average."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

DECAY = 0.9
"""Mass that an iteration keeps for each one that came after it."""


def constant_weights(members: int) -> list[float]:
    """The same for each of ``members``."""
    return [1.0 / members] * members


def sample_weights(samples: Sequence[int]) -> list[float]:
    """In proportion to the samples that each member has seen; the same for each if none has seen any."""
    total = sum(samples)
    return [count / total for count in samples] if total else constant_weights(len(samples))


def dynamic_weights(iterations: Sequence[int], decay: float = DECAY) -> list[float]:
    """Less for members whose model is older (Partial Reduce, SIGMOD 2021, dynamic weights).

    A model that is ``age - 1`` iterations behind the newest gets mass ``decay ** (age - 1) * (1 - decay)``, as in a
    moving average over iterations; ages that no member has give theirs to the newest, and members of one age share.
    Where many fresh members share one age, this would let a lone stale one outweigh each of them, so that the result is
    projected onto weights that do not grow with age (isotonic regression).

    Args:
        iterations: of each member's model.
        decay: between 0 and 1.

    Returns:
        One weight a member; they sum to one.
    """
    newest = max(iterations)
    sharing = Counter(newest - iteration + 1 for iteration in iterations)
    ages = sorted(sharing)
    oldest = ages[-1]
    masses = [decay ** (age - 1) * (1 - decay) / (1 - decay**oldest) for age in ages]
    masses[0] += 1.0 - sum(masses)
    weights = dict(zip(ages, _falling(masses, [sharing[age] for age in ages]), strict=True))
    return [weights[newest - iteration + 1] for iteration in iterations]


def _falling(masses: Sequence[float], sharing: Sequence[int]) -> list[float]:
    """For each age, its members' weight: masses shared out, neighbours pooled until none exceeds its predecessor."""
    pools: list[tuple[float, int, int]] = []  # mass, members, ages
    for mass, members in zip(masses, sharing, strict=True):
        pool = (mass, members, 1)
        while pools and pool[0] / pool[1] > pools[-1][0] / pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return [mass / members for mass, members, ages in pools for _ in range(ages)]
