"""Shares from times: the least time of the slowest rank."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from lightning_autosync.replay.balance import Line, balance, fit_line

FREE = [math.inf] * 4


def longest(lines: Sequence[Line], parts: Sequence[int]) -> float:
    return max(line.seconds(part) for line, part in zip(lines, parts, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_the_slowest_rank_needs_the_least_time_of_all_divisions(seed: int) -> None:
    drawn = random.Random(seed)
    lines = [Line(drawn.choice([0.0, drawn.random()]), 0.1 + drawn.random()) for _ in range(3)]
    bounds = [drawn.choice([math.inf, 5.0]) for _ in range(2)] + [math.inf]
    every = [
        parts
        for parts in itertools.product(range(1, 13), repeat=3)
        if sum(parts) == 12 and all(part <= bound for part, bound in zip(parts, bounds, strict=True))
    ]
    parts = balance(lines, 12, bounds)
    assert tuple(parts) in every
    assert longest(lines, parts) == pytest.approx(min(longest(lines, each) for each in every))


def test_equal_ranks_get_equal_parts() -> None:
    assert balance([Line(0.1, 0.01)] * 4, 32, FREE) == [8, 8, 8, 8]
    assert sorted(balance([Line(0.1, 0.01)] * 4, 34, FREE)) == [8, 8, 9, 9]


def test_bounds_that_leave_no_room_do_not_count() -> None:
    assert balance([Line(0.0, 1.0)] * 2, 8, [2.0, 2.0]) == [4, 4]


def test_two_numbers_of_samples_tell_the_fixed_part_of_a_batch() -> None:
    line = fit_line(4, 14.0, (8, 18.0))
    assert (line.fixed, line.each) == (10.0, 1.0)
    for before in (None, (5, 15.0), (8, 12.0), (8, 40.0)):  # none, too near, faster with more, below 0 with none
        assert fit_line(4, 14.0, before) == Line(0.0, 3.5)


@pytest.mark.parametrize("before", [13.9, 14.0, 14.1])
def test_equal_times_for_different_numbers_of_samples_are_those_of_a_batch(before: float) -> None:
    line = fit_line(4, 14.0, (16, before))
    assert line.fixed == pytest.approx(14.0, rel=0.03)
    assert line.seconds(4) == pytest.approx(14.0)
