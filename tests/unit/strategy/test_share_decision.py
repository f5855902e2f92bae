"""When shares change: for a slow rank soon, for noise not, and only for steps that get faster."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.replay.balance import Line, balance
from lightning_autosync.strategy.shares.auto import CALM, EVERY, KEPT
from lightning_autosync.strategy.shares.decision import FIRST_PASSES, Balancer, Pass

SAMPLES = 16
EQUAL = Line(0.5, 1.0)
SLOW = Line(2.0, 4.0)
Draw = Callable[[random.Random], float]


@dataclass
class Job:
    """Ranks whose times are told to a `Balancer` as `AutoShares` does.

    Attributes:
        pace: the lines of ranks in a pass.
        noise: draws a factor of the time of a rank.
        step: seconds of a step, from the times of ranks for their parts.
        counts: samples of each rank in the next pass.
        history: samples of each rank in each pass.
        seconds: of each step.
    """

    pace: Callable[[int], Sequence[Line]]
    noise: Draw = lambda _: 1.0
    step: Callable[[Sequence[float]], float] = max
    seed: int = 0
    balancer: Balancer = field(default_factory=Balancer)
    counts: list[int] = field(default_factory=list)
    history: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, passes: int) -> Job:
        drawn, told, ignored = random.Random(self.seed), [], 1
        self.counts = self.counts or [SAMPLES] * len(self.pace(0))
        for number in range(1, passes + 1):
            lines = zip(self.pace(number), self.counts, strict=True)
            busy = [line.seconds(count) * self.noise(drawn) for line, count in lines]
            self.history.append(self.counts)
            self.seconds.append(self.step(busy))
            if ignored:  # the first pass with these counts
                ignored -= 1
                continue
            told = [*told, Pass(busy, self.seconds[-1])][-KEPT:]
            if number <= FIRST_PASSES or number % (CALM if self.balancer.is_calm else EVERY) == 0:
                best = self.balancer.record(self.counts, told, [math.inf] * len(busy))
                told = []
                if best is not None:
                    self.counts, ignored = best, 1
        return self

    @property
    def changes(self) -> int:
        return sum(one != other for one, other in itertools.pairwise(self.history))

    def found(self, rank: int = -1) -> int:
        """The number of passes in which a rank computes more than half of its equal share."""
        return sum(counts[rank] > SAMPLES / 2 for counts in self.history)


def longest(lines: Sequence[Line], counts: Sequence[int]) -> float:
    return max(line.seconds(count) for line, count in zip(lines, counts, strict=True))


def exponential(scale: float) -> Draw:
    return lambda drawn: 1.0 + scale * drawn.expovariate(1.0)


def pareto(scale: float, exponent: float) -> Draw:
    return lambda drawn: 1.0 + scale * (drawn.paretovariate(exponent) - 1.0)


def interruptions(share: float, factor: float) -> Draw:
    return lambda drawn: factor if drawn.random() < share else 1.0 + 0.02 * drawn.random()


HEAVY = st.one_of(
    st.builds(exponential, st.floats(0.0, 1.0)),
    st.builds(pareto, st.floats(0.0, 0.5), st.floats(1.2, 3.0)),
    st.builds(interruptions, st.floats(0.0, 0.1), st.floats(2.0, 10.0)),
)


def test_it_says_why_shares_are_kept() -> None:
    job = Job(lambda _: [EQUAL] * 4)
    assert job.run(2).balancer.why_kept == ""
    assert job.run(30).balancer.why_kept.startswith("ranks do not differ enough in speed ")
    noisy = Job(lambda _: [EQUAL] * 4, lambda drawn: drawn.choice((1.0, 5.0))).run(30)
    assert noisy.balancer.why_kept.endswith("from step to step, too much to tell its speed")


@given(ranks=st.integers(2, 8), noise=HEAVY, seed=st.integers(0, 1 << 30))
@examples(200)
def test_equal_ranks_keep_equal_shares_under_heavy_tailed_noise(ranks: int, noise: Draw, seed: int) -> None:
    job = Job(lambda _: [EQUAL] * ranks, noise, seed=seed).run(90)
    assert all(abs(count - SAMPLES) <= SAMPLES / 10 for counts in job.history for count in counts)


@given(
    ranks=st.integers(2, 8),
    noise=st.one_of(st.builds(exponential, st.floats(0.0, 0.15)), st.builds(pareto, st.floats(0.0, 0.1), st.just(3.0))),
    seed=st.integers(0, 1 << 30),
)
@examples(100)
def test_a_rank_that_is_four_times_slower_is_found_within_20_steps(ranks: int, noise: Draw, seed: int) -> None:
    job = Job(lambda _: [EQUAL] * (ranks - 1) + [SLOW], noise, seed=seed).run(25)
    assert job.found() <= 20


@pytest.mark.parametrize(("ranks", "passes"), [(2, 8), (4, 5), (8, 4)])
def test_a_rank_that_is_much_slower_is_found_in_the_first_passes(ranks: int, passes: int) -> None:
    lines = [EQUAL] * (ranks - 1) + [SLOW]
    job = Job(lambda _: lines, exponential(0.02)).run(60)
    assert job.found() <= passes + 1
    assert longest(lines, job.counts) <= 1.06 * longest(lines, balance(lines, SAMPLES * ranks, [math.inf] * ranks))


@pytest.mark.parametrize("slow", [1.6, 4.0])
@pytest.mark.parametrize("start", range(40, 40 + CALM, 2))
def test_a_rank_that_slows_down_is_answered_within_12_steps(slow: float, start: int) -> None:
    late = Line(EQUAL.fixed * slow, EQUAL.each * slow)
    job = Job(lambda number: [EQUAL] * 3 + [late if number > start else EQUAL], exponential(0.02)).run(80)
    assert job.changes >= 1
    assert job.history[start - 1] == [SAMPLES] * 4
    assert job.history[start + 12][3] < SAMPLES


def test_times_are_exchanged_less_often_when_shares_have_not_changed_for_long() -> None:
    assert not Job(lambda _: [EQUAL] * 3 + [SLOW]).run(20).balancer.is_calm
    calm = Job(lambda _: [EQUAL] * 4).run(30).balancer
    assert calm.is_calm
    calm.forget()
    assert not calm.is_calm


@pytest.mark.parametrize(("slow", "changes"), [(1.03, 0), (1.25, 1)])
def test_shares_change_for_gains_of_more_than_5_percent(slow: float, changes: int) -> None:
    lines = [EQUAL] * 3 + [Line(EQUAL.fixed * slow, EQUAL.each * slow)]
    assert Job(lambda _: lines, exponential(0.01)).run(120).changes == changes


@pytest.mark.parametrize("factor", [1.5, 4.0])
def test_a_change_that_made_steps_no_faster_is_taken_back(factor: float) -> None:
    """Times that seem to be those of samples, but steps that are fastest with equal shares."""
    job = Job(lambda _: [Line(0.0, 1.0)] * 3 + [Line(0.0, factor)], exponential(0.01))
    job.step = lambda _: 16.0 + max(job.counts)
    job.run(200)
    assert job.history[-1] == [SAMPLES] * 4
    assert 2 <= job.changes <= 12
    assert statistics.fmean(job.seconds) < 1.05 * 32.0


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, False), (0.995, False), (0.98, True)])
def test_a_change_is_kept_if_steps_are_at_least_1_percent_faster(ratio: float, kept: bool) -> None:
    job = Job(lambda _: [Line(0.0, 1.0)] * 3 + [Line(0.0, 4.0)], exponential(0.01))
    job.step = lambda _: 20.0 if job.counts == [SAMPLES] * 4 else 20.0 * ratio
    job.run(30)
    assert job.changes >= 1
    assert (job.balancer.taken_back == 0) == kept


def test_a_harmful_change_is_taken_back_after_three_passes() -> None:
    job = Job(lambda _: [Line(0.0, 1.0)] * 3 + [Line(0.0, 4.0)], exponential(0.01))
    job.step = lambda _: 4.0 * max(job.counts)
    job.run(16)
    changed = [number for number, counts in enumerate(job.history) if counts != [SAMPLES] * 4]
    assert 0 < len(changed) <= 5
    assert job.balancer.taken_back == 1


def test_a_change_after_which_plans_are_tried_is_kept() -> None:
    job = Job(lambda _: [EQUAL] * 3 + [SLOW], exponential(0.01), step=lambda _: math.nan).run(60)
    assert job.found() <= 6
    assert job.balancer.taken_back == 0


def test_a_time_that_does_not_depend_on_samples_is_that_of_a_batch() -> None:
    """A rank that waits equally long in each batch, so that no shares help."""
    job = Job(lambda _: [Line(0.0, 1.0)] * 3 + [Line(64.0, 0.001)], exponential(0.01)).run(200)
    assert job.history[-1] == [SAMPLES] * 4
    assert job.changes <= 4


@pytest.mark.parametrize(("slow_now", "returns"), [(1.0, True), (3.0, False)])
def test_unequal_shares_do_not_stay_in_noise_that_hides_speeds(slow_now: float, returns: bool) -> None:
    """A rank that was slow is as fast as others when noise begins; or it is still slow."""
    drawn = random.Random(5)

    def pace(number: int) -> list[Line]:
        slow = 3.0 if number <= 40 else slow_now
        noise = [1.0 if number <= 40 else 1.0 + drawn.expovariate(1.0) for _ in range(2)]
        return [Line(0.0, noise[0]), Line(0.0, slow * noise[1])]

    job = Job(pace, exponential(0.02)).run(200)
    assert job.history[40][1] < SAMPLES / 1.5
    assert (job.history[-1] == [SAMPLES] * 2) == returns


def test_a_process_that_holds_cores_at_times_costs_equal_ranks_little() -> None:
    """Half of the ranks take twice as long for some 20 passes in a row, again and again, and other ranks each time."""
    ratios = []
    for seed in range(6):
        drawn, held = random.Random(seed), []
        while len(held) <= 300:
            held += [frozenset[int]()] * int(drawn.expovariate(1 / 80))
            held += [frozenset(drawn.sample(range(4), 2))] * drawn.randint(10, 30)

        def pace(number: int, held: Sequence[frozenset[int]] = tuple(held)) -> list[Line]:
            return [
                Line(0.5 * factor, factor) for factor in (2.0 if rank in held[number] else 1.0 for rank in range(4))
            ]

        job = Job(pace, exponential(0.05), seed=seed).run(300)
        equal = Job(pace, exponential(0.05), seed=seed, balancer=Never()).run(300)
        ratios.append(sum(job.seconds) / sum(equal.seconds))
    assert statistics.fmean(ratios) < 1.01


class Never(Balancer):
    """Changes nothing."""

    def record(self, *_: object) -> None:
        return None


def test_memory_demands_a_change_that_does_not_pay() -> None:
    balancer, passes, free = Balancer(), [Pass([1.0] * 4, 1.0)], [math.inf] * 3
    assert balancer.record([16] * 4, passes, [math.inf, *free]) is None
    best = balancer.record([16] * 4, passes, [8.0, *free])
    assert best is not None
    assert (best[0], sorted(best[1:])) == (8, [18, 19, 19])


def test_bounds_that_leave_no_room_demand_no_change() -> None:
    balancer, passes = Balancer(), [Pass([1.0, 1.02], 1.0)]
    assert [balancer.record([32, 32], passes, [8.0, 8.0]) for _ in range(5)] == [None] * 5
