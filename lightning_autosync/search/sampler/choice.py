"""Which candidates to measure: fast by belief, uncertain, and unlike those that are chosen already."""

from __future__ import annotations

import numpy

from lightning_autosync.search.sampler.belief import Beliefs
from lightning_autosync.search.sampler.features import Floats, similarity

OPTIMISM = 1.0
"""Deviations below the mean at which a candidate is valued: the lower bound of a confidence interval."""
ALIKENESS = 0.03
"""Logarithm of seconds that a candidate loses for being the same as one that is chosen."""
STARTUP_ALIKENESS = 0.2
"""The same while little was measured: what the simulator gets wrong shows where plans differ."""


def optimistic(beliefs: Beliefs) -> Floats:
    """[n] lower bounds of the logarithms of seconds (Srinivas et al., 2010)."""
    bounds: Floats = beliefs.mean - OPTIMISM * beliefs.deviation
    return bounds


def pick(beliefs: Beliefs, features: Floats, chosen: Floats, count: int, alikeness: float = ALIKENESS) -> list[int]:
    """The best ``count`` candidates in order, each unlike ``chosen`` [m, features] and those picked before.

    Greedy, for low time and low similarity (AutoSync, section 4); uncertainty counts as in `optimistic`.

    Args:
        beliefs: of the candidates.
        features: [n, features] of theirs.
        chosen: features of plans that are being measured.
        count: how many are wanted; at most n are returned.
        alikeness: what being the same as a chosen one costs.
    """
    value = optimistic(beliefs)
    likeness = similarity(features, chosen).max(axis=1) if len(chosen) else numpy.zeros(len(features))
    picked: list[int] = []
    for _ in range(min(count, len(features))):
        cost = value + alikeness * likeness
        cost[picked] = numpy.inf
        best = int(numpy.argmin(cost))
        picked.append(best)
        likeness = numpy.maximum(likeness, similarity(features, features[best : best + 1])[:, 0])
    return picked
