"""Two plans take turns, and the faster one is found in few passes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.strategy.tuning.contest import Contest, candidates_turn
from lightning_autosync.strategy.tuning.tuner import Candidate, Tuner


def run_contest(own: float, candidate: float, noise: float = 0.0, seed: int = 0, most: int = 16) -> Contest:
    rng = random.Random(seed)
    contest = Contest(most, [own])
    for number in range(8 * most):
        mine = candidates_turn(number)
        contest.record(mine, (candidate if mine else own) * math.exp(rng.gauss(0, noise)))
        if contest.accepted is not None:
            return contest
    raise AssertionError("not decided")


def test_a_faster_plan_is_accepted_after_a_few_passes() -> None:
    contest = run_contest(0.1, 0.08)
    assert contest.accepted is True
    assert max(contest.passes) <= 10
    assert contest.ratio == pytest.approx(0.8)


def test_a_much_slower_plan_is_given_up_after_two_passes() -> None:
    contest = run_contest(0.1, 0.2)
    assert contest.accepted is False
    assert contest.passes[1] == 2


def test_a_clearly_slower_plan_is_given_up_soon() -> None:
    contest = run_contest(0.1, 0.12)
    assert contest.accepted is False
    assert max(contest.passes) <= 6


@pytest.mark.parametrize("ratio", [1.0, 0.995, 1.2])
def test_a_plan_that_gains_nothing_is_not_accepted(ratio: float) -> None:
    assert run_contest(0.1, 0.1 * ratio).accepted is False


def test_noise_is_waited_out() -> None:
    right = sum(run_contest(0.1, 0.09, noise=0.05, seed=seed).accepted is True for seed in range(40))
    wrong = sum(run_contest(0.1, 0.11, noise=0.05, seed=seed).accepted is True for seed in range(40))
    assert right >= 38
    assert wrong <= 1


def test_one_disturbed_pass_decides_nothing() -> None:
    contest = Contest(16, [0.1])
    contest.record(False, 0.1)
    contest.record(True, 5.0)
    assert contest.accepted is None


def drive(tuner: Tuner, seconds: list[float], passes: int, lag: int = 1, noise: float = 0.0) -> list[int]:
    """The plan of each pass, if pass times arrive ``lag`` passes late."""
    rng = random.Random(1)
    chosen: list[int] = []
    recorded = 0
    for _ in range(passes):
        if tuner.opening is not None:
            tuner.opened()
        chosen.append(tuner.following())
        while len(chosen) - recorded > lag:
            tuner.record(seconds[chosen[recorded]] * math.exp(rng.gauss(0, noise)))
            recorded += 1
    return chosen


CANDIDATES = [
    Candidate("first", 0.10),
    Candidate("second", 0.10),
    Candidate("third", 0.105),
    Candidate("ddp", 0.3, True),
]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_fastest_plan_is_kept(lag: int) -> None:
    tuner = Tuner(CANDIDATES, warm_up=2)
    chosen = drive(tuner, [0.2, 0.21, 0.12, 0.6], 200, lag)
    assert tuner.finished
    assert tuner.present == 2
    assert chosen[-1] == 2
    assert [trial.accepted for trial in tuner.trials] == [False, False, True]  # ddp, second, third


def test_ddp_is_tried_whatever_was_predicted_and_wins_where_it_is_faster() -> None:
    tuner = Tuner(CANDIDATES, warm_up=2)
    drive(tuner, [0.2, 0.21, 0.22, 0.1], 200)
    assert tuner.present == 3


def test_plans_that_are_not_expected_to_gain_are_not_tried() -> None:
    tuner = Tuner([Candidate("first", 0.1), Candidate("slow", 1.0)], warm_up=1)
    assert set(drive(tuner, [0.1, 1.0], 50)) == {0}
    assert "expected" in tuner.finished


@pytest.mark.parametrize(("predicted", "tried"), [(1.08, True), (1.12, False)])
@pytest.mark.parametrize("native", [False, True])
def test_plans_that_are_predicted_to_be_much_slower_are_not_tried(predicted: float, tried: bool, native: bool) -> None:
    """What is assumed of plans of another kind before any trial does not count for that."""
    tuner = Tuner([Candidate("present", 1.0, native=native), Candidate("other", predicted)], warm_up=1)
    drive(tuner, [1.0, 1.0], 100)
    assert bool(tuner.trials) == tried


@pytest.mark.parametrize(("horizon", "tried"), [(1000, True), (10, False)])
def test_plans_are_tried_if_the_passes_to_come_repay_the_trial(horizon: int, tried: bool) -> None:
    tuner = Tuner([Candidate("present", 1.0), Candidate("other", 1.0)], warm_up=1, horizon=horizon)
    drive(tuner, [1.0, 1.0], 100)
    assert bool(tuner.trials) == tried


def test_without_other_plans_nothing_is_tried() -> None:
    tuner = Tuner([Candidate("only", 1.0)], warm_up=1)
    drive(tuner, [0.5], 10)
    assert tuner.finished == "there is no other plan to try"
    assert tuner.usual_seconds == 0.5


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 7])
def test_a_training_loop_with_different_passes_favours_no_plan(period: int) -> None:
    """The first of so many passes takes three times as long, as in a loop of critics and a generator."""
    contest = Contest(32, [1.0])
    for number in range(64):
        contest.record(candidates_turn(number), 3.0 if number % period == 0 else 1.0)
    assert contest.accepted is not True


def test_equal_plans_with_noise_are_rarely_accepted() -> None:
    wrong = sum(run_contest(0.1, 0.1, noise=0.03, seed=seed).accepted is True for seed in range(100))
    assert wrong <= 20


def test_each_plan_has_half_of_the_turns_after_one_pass_that_does_not_count() -> None:
    tuner = Tuner([Candidate("first", 0.1), Candidate("second", 0.1)], warm_up=1, passes=16)
    chosen = drive(tuner, [0.1, 0.1], 40, lag=0)
    turns = chosen[chosen.index(1) + 1 :]
    for start in range(0, 16, 4):
        assert sum(turns[start : start + 4]) == 2
    assert turns[:4] != turns[4:8] or turns[4:8] != turns[8:12]


def test_a_candidate_is_tried_once_it_is_open_and_passes_before_do_not_count() -> None:
    tuner = Tuner([Candidate("first", 0.1), Candidate("second", 0.1)], warm_up=1, passes=4)
    while tuner.opening is None:
        assert tuner.following() == 0
        tuner.record(0.1)
    for _ in range(20):
        assert tuner.following() == 0
        tuner.record(9.9)
    tuner.opened()
    assert drive(tuner, [0.1, 0.05], 20)[0] == 1
    assert tuner.trials[0].seconds == (0.1, 0.05)


def test_passes_that_do_not_count_are_left_out() -> None:
    tuner = Tuner([Candidate("first", 0.1), Candidate("second", 0.1)], warm_up=1)
    for _ in range(30):
        tuner.following()
        tuner.record(float("nan"))
    assert tuner.trying is None
    assert not tuner.trials


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.lists(st.floats(0.01, 10), min_size=6, max_size=6),
    st.integers(0, 4),
)
def test_tuning_ends_with_a_plan_that_is_no_slower_than_the_first(
    predicted: list[float], seconds: list[float], lag: int
) -> None:
    candidates = [Candidate(str(number), each, always=number == 1) for number, each in enumerate(predicted)]
    tuner = Tuner(candidates, warm_up=1, passes=8)
    chosen = drive(tuner, seconds, 20 * 6 * 3 + 30, lag)
    assert tuner.finished
    assert seconds[tuner.present] <= seconds[0]
    assert chosen[-1] == tuner.present


def test_a_plan_that_cannot_be_opened_is_no_trial_and_the_next_one_is_tried() -> None:
    tuner = Tuner([Candidate("present", 1.0), Candidate("closed", 0.5), Candidate("open", 0.5)], warm_up=1, passes=8)
    chosen = []
    for _ in range(60):
        if tuner.opening == 1:
            tuner.give_up()
        elif tuner.opening == 2:
            tuner.opened()
        chosen.append(tuner.following())
        tuner.record(0.5 if chosen[-1] == 2 else 1.0)
    assert 1 not in chosen
    assert [trial.candidate for trial in tuner.trials] == [2]
    assert tuner.present == 2
    assert tuner.finished == (
        "no other plan is expected to gain more than a trial costs; ranks could not set up 1 plan"
    )


def test_tuning_whose_plans_cannot_be_opened_says_so() -> None:
    tuner = Tuner([Candidate(name, 1.0, always=True) for name in ("present", "one", "other")], warm_up=1)
    while not tuner.finished:
        if tuner.opening is not None:
            tuner.give_up()
        assert tuner.following() == 0
        tuner.record(1.0)
    assert tuner.finished == "there is no other plan to try; ranks could not set up 2 plans"
    assert tuner.trials == []
