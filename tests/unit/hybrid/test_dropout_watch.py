"""Dropout on two ranks is compared: what they drop by chance is no fault."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autosync.hybrid.execution.dropout_watch import _faults, _Watch
from lightning_autosync.hybrid.execution.random_streams import RandomStreams


def draws(drop: Callable[[], Tensor], rank: int, state: str, seed: int) -> list[Any]:
    """What a rank tells of its draws for a value in this state."""
    around = SimpleNamespace(home_states=(state,), streams=RandomStreams(0, (rank,), torch.device("cpu")))
    split: Any = SimpleNamespace(around=around)
    watch = _Watch(split)
    with watch, torch.random.fork_rng():
        torch.manual_seed(seed)
        drop()
    return [list(draw) for draw in watch.found]


CHANCE: dict[str, Callable[[], Tensor]] = {
    "rarely any": lambda: F.dropout(torch.ones(8, 32), 0.01),
    "nearly all": lambda: F.dropout(torch.ones(8, 32), 0.99),
    "few elements": lambda: torch.dropout(torch.ones(3), 0.5, True),
    "few channels": lambda: F.dropout2d(torch.ones(2, 2, 16, 16), 0.5),
    "few channels of a sequence": lambda: F.dropout1d(torch.ones(2, 2, 64), 0.2),
    "few channels with another mean": lambda: F.feature_alpha_dropout(torch.ones(2, 2, 64), 0.5, training=True),
    "no elements": lambda: F.dropout(torch.ones(0, 4), 0.5),
}


@pytest.mark.parametrize("name", CHANCE)
def test_draws_that_are_equal_by_chance(name: str) -> None:
    drawn = [[draws(CHANCE[name], rank, "features", seed) for seed in range(10)] for rank in range(2)]
    for one, other in combinations(range(10), 2):
        assert _faults([drawn[0][one], drawn[1][other]]) == []


TELLING: dict[str, Callable[[], Tensor]] = {
    "elements": lambda: F.dropout(torch.ones(16, 16), 0.1),
    "elements in place": lambda: F.dropout(torch.ones(16, 16), 0.9, inplace=True),
    "channels": lambda: F.dropout2d(torch.ones(8, 16, 2, 2), 0.3),
    "another mean": lambda: F.alpha_dropout(torch.ones(16, 16), 0.3, training=True),
}


@pytest.mark.parametrize("name", TELLING)
def test_draws_that_tell(name: str) -> None:
    same, other = (
        [draws(TELLING[name], rank, "features", seed) for rank, seed in enumerate(s)] for s in ((1, 1), (1, 2))
    )
    assert _faults(same) == ["ranks 0 and 1 dropped the same elements of different values"]
    assert _faults(other) == []
    found = [draws(TELLING[name], rank, "full", rank) for rank in range(2)]
    assert _faults(found) == ["ranks 0 and 1 dropped different elements of the same value"]


def test_few_elements_of_the_same_value_are_compared() -> None:
    found = [draws(lambda: F.dropout(torch.ones(8), 0.5), rank, "full", rank) for rank in range(2)]
    assert _faults(found) == ["ranks 0 and 1 dropped different elements of the same value"]
