"""Statistics of the times of steps: from those of ranks to those of the job, and from those to one number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_FEW = 6
"""With fewer steps, half of them are too few for a median that ignores a pause."""


def job_steps(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """[steps] seconds of each step of a synchronous job: the mean of its ranks; empty if there are no ranks.

    Over many steps, all ranks take equally long, but not in each step: a rank that ends a step later than others begins
    the next one later, which is then shorter for it. Between two sites, the ranks of either site can have a long and a
    short step in turn. So in each step some rank takes longer than the job needs for a step on average.

    Args:
        by_rank: seconds by rank and step.

    Raises:
        ValueError: ranks have different numbers of steps.
    """
    return [statistics.fmean(each) for each in zip(*by_rank, strict=True)]


def typical_step(seconds: Sequence[float]) -> float:
    """Seconds of a typical step: a median, which ignores single disturbed steps.

    Long and short steps in turn count half each if there are six steps or more: it is the mean of the medians of every
    other step. With fewer steps it is the median of all.

    Args:
        seconds: seconds of successive steps, at least one.
    """
    if len(seconds) < _FEW:
        return statistics.median(seconds)
    return statistics.fmean(statistics.median(seconds[first::2]) for first in (0, 1))
