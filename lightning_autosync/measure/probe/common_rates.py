"""Common rates for links whose measured rates differ by about as much as measurements scatter.

Trees for many ranks are packed by classes of nodes with equal links (:mod:`lightning_autosync.cluster.classes`).
Without common rates, no two measured nodes would be alike. Truly different rates may become one, too: those with gaps
below 2%, and within 15% in all. Among few ranks, trees need no classes, and rates stay as measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_GAP = 0.02
"""Difference of neighbouring rates that is no noise. All differences here are logarithms of ratios."""
_SPANS = 7.0
"""Largest difference between directions among thousands of equal links, relative to the median one: 4.7 deviations."""
_LARGEST_SPAN = 0.15
"""If noise were to span more, links differ by direction: then nothing tells how far measurements scatter."""


def with_common_rates(links: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The rates of links with one value for those that differ by little: the lower median of these.

    The ratio of the two directions is the same for most links. So its differences between links tell how far
    measurements scatter. Directions of a link that differ by noise get their mean first. Then neighbouring rates
    without a gap get a common value, as far as noise spans.

    Args:
        links: rates in both directions of each link, above zero.
    """
    ratios = [math.log(one / other) for one, other in links]
    usual = statistics.median(ratios)
    span = _SPANS * statistics.median(abs(ratio - usual) for ratio in ratios)
    span = max(span, _GAP) if span <= _LARGEST_SPAN else _GAP
    evened = [(sum(both) / 2,) * 2 if math.log(max(both) / min(both)) <= span else both for both in links]
    groups: list[list[float]] = []
    for rate in sorted(rate for both in evened for rate in both):
        if not groups or math.log(rate / groups[-1][-1]) > _GAP or math.log(rate / groups[-1][0]) > span:
            groups.append([])
        groups[-1].append(rate)
    common = {rate: statistics.median_low(group) for group in groups for rate in group}
    return [(common[one], common[other]) for one, other in evened]
