"""Shares from times: the least time of the slowest rank, changes that pay, and few of them."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from lightning_autosync.strategy.shares.balance import Balancer, Line, Window, balance, fit_line

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


def run(pace: Callable[[int], Sequence[Line]], windows: int, noise: float = 0.0) -> list[list[int]]:
    """The counts in each window of ranks with these lines. Noise adds to the time of each of three passes."""
    drawn, balancer, counts, history = random.Random(2), Balancer(), [16] * 4, []
    for window in range(windows):
        history.append(counts)
        times = [
            [line.seconds(count) * (1.0 + noise * drawn.expovariate(1.0)) for _ in range(3)]
            for line, count in zip(pace(window), counts, strict=True)
        ]
        found = Window(list(map(min, times)), list(map(statistics.median, times)))
        counts = balancer.record(counts, found, FREE) or counts
    return history


@pytest.mark.parametrize("fixed", [0.0, 5.0])
def test_unequal_ranks_are_balanced_within_four_changes(fixed: float) -> None:
    lines = [Line(fixed * factor, factor) for factor in (1.0, 1.0, 1.0, 4.0)]
    history = run(lambda _: lines, 20)
    changes = sum(one != other for one, other in itertools.pairwise(history))
    assert changes <= 4
    assert longest(lines, history[-1]) <= 1.05 * longest(lines, balance(lines, 64, FREE))


def test_a_rank_that_slows_down_is_answered_after_two_windows() -> None:
    slow = [Line(1.0, 1.0)] * 3 + [Line(4.0, 4.0)]
    history = run(lambda window: [Line(1.0, 1.0)] * 4 if window < 10 else slow, 30)
    assert history[11] == [16, 16, 16, 16]
    assert history[12][3] < 7
    assert longest(slow, history[-1]) <= 1.05 * longest(slow, balance(slow, 64, FREE))


@pytest.mark.parametrize(("noise", "loss"), [(0.05, 1.0), (0.3, 1.01)])
def test_equal_ranks_lose_little_to_noise(noise: float, loss: float) -> None:
    history = run(lambda _: [Line(1.0, 1.0)] * 4, 300, noise)
    assert statistics.fmean(longest([Line(1.0, 1.0)] * 4, counts) for counts in history) <= 17.0 * loss


def test_memory_demands_a_change_that_does_not_pay() -> None:
    balancer, window = Balancer(), Window([1.0] * 4, [1.0] * 4)
    assert balancer.record([16] * 4, window, FREE) is None
    best = balancer.record([16] * 4, window, [8.0, *FREE[1:]])
    assert best is not None
    assert (best[0], sorted(best[1:])) == (8, [18, 19, 19])


@pytest.mark.parametrize(("noise", "loss"), [(0.1, 1.01), (0.2, 1.03)])
def test_noise_changes_few_shares_in_the_first_steps(noise: float, loss: float) -> None:
    lines = [Line(0.0, 1.0)] * 8
    longests, changes = [], 0
    for seed in range(60):
        drawn, balancer, counts = random.Random(seed), Balancer(), [16] * 8
        for window in range(20):
            longests.append(longest(lines, counts))
            passes = 3 if window else 1
            times = [[count * (1.0 + noise * drawn.expovariate(1.0)) for _ in range(passes)] for count in counts]
            found = Window(list(map(min, times)), list(map(statistics.median, times)))
            best = balancer.record(counts, found, [math.inf] * 8)
            changes += window == 0 and best is not None
            counts = best or counts
    assert changes <= 2
    assert statistics.fmean(longests) <= 16.0 * loss


def test_bounds_that_leave_no_room_demand_no_change() -> None:
    balancer, window = Balancer(), Window([1.0, 1.02], [1.0, 1.02])
    assert [balancer.record([32, 32], window, [8.0, 8.0]) for _ in range(5)] == [None] * 5
