"""Evolution over parameters of any kind: what the sampler does where it knows no space of plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

STARTUP = 10
"""Trials before the first child."""
_PARENTS = 0.25
"""Share of the trials, the best of them, that have children; four at least."""

Draw = Callable[[str, BaseDistribution], Any]


def evolve(
    trials: Sequence[FrozenTrial],
    direction: StudyDirection,
    search_space: Mapping[str, BaseDistribution],
    rng: Random,
    draw: Draw,
) -> dict[str, Any]:
    """A child of two of the best trials: each parameter from either, one of them, on average, drawn anew.

    Running trials count as the worst value seen (constant liar), so that they have no children before they end, unless
    hardly any has ended.
    """
    ranked = _ranked(trials, direction, search_space)
    if len(ranked) < STARTUP:
        return {name: draw(name, distribution) for name, distribution in search_space.items()}
    best = ranked[: max(4, math.ceil(_PARENTS * len(ranked)))]
    parents = rng.choice(best), rng.choice(best)
    child = {name: rng.choice(parents).params[name] for name in search_space}
    for name, distribution in search_space.items():
        if rng.random() < 1 / len(search_space):
            child[name] = draw(name, distribution)
    return child


def _ranked(
    trials: Sequence[FrozenTrial], direction: StudyDirection, search_space: Mapping[str, BaseDistribution]
) -> list[FrozenTrial]:
    """Trials with all parameters, best first; those that run at the worst value."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    known = [trial for trial in trials if search_space.keys() <= trial.params.keys()]
    values = {trial.number: sign * trial.value for trial in known if _is_valued(trial) and trial.value is not None}
    liar = max(values.values(), default=math.inf)
    values |= {trial.number: liar for trial in known if trial.state == TrialState.RUNNING}
    return sorted((trial for trial in known if trial.number in values), key=lambda t: (values[t.number], t.number))


def _is_valued(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and trial.value is not None and not math.isnan(trial.value)
