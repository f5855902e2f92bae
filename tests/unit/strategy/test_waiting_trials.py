"""Where steps may overlap, trials decide whether they do: a job ends with the faster of overlap and waiting."""

from __future__ import annotations

import pytest

from lightning_autosync.strategy.tuning.tuner import Candidate, Tuner

CANDIDATES = [
    Candidate("byteps", 0.36, messages=20),
    Candidate("trees", 0.37, messages=10),
    Candidate("all_reduce", 0.46, native=True, messages=4),
    Candidate("trees, waiting", 0.47, messages=10, waits=True),
    Candidate("all_reduce, waiting", 0.48, always=True, native=True, messages=4, waits=True),
]


def drive(tuner: Tuner, seconds: list[float], passes: int = 600) -> None:
    for _ in range(passes):
        if tuner.opening is not None:
            tuner.opened()
        tuner.record(seconds[tuner.following()])
    assert tuner.finished


def test_a_job_whose_steps_are_faster_if_they_wait_ends_waiting() -> None:
    tuner = Tuner(CANDIDATES, warm_up=1)
    drive(tuner, [0.52, 0.52, 0.6, 0.48, 0.5])
    assert tuner.present == 3


def test_a_job_whose_steps_are_faster_if_they_overlap_ends_with_overlap() -> None:
    tuner = Tuner(CANDIDATES, warm_up=1)
    drive(tuner, [0.39, 0.4, 0.47, 0.48, 0.49])
    assert tuner.present == 0
    assert {3, 4} <= {trial.candidate for trial in tuner.trials}


def test_what_a_pass_that_overlaps_costs_the_next_one_counts_for_overlap() -> None:
    """A pass that waits pays for the pass before if that one overlapped, so single passes in turn would favour overlap.

    In a row, passes that wait take 0.29 s, and passes that overlap 0.31 s.
    """
    tuner, last = Tuner([Candidate("overlaps", 0.27), Candidate("waiting", 0.3, waits=True)], warm_up=1), 0
    for _ in range(200):
        if tuner.opening is not None:
            tuner.opened()
        plan = tuner.following()
        tuner.record([0.28, 0.29][plan] + 0.03 * (last == 0))
        last = plan
    assert tuner.finished
    assert tuner.present == 1
    assert max(tuner.trials[0].passes) <= 32


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_pass_after_those_of_a_plan_outside_the_trial_does_not_count(interrupted: bool) -> None:
    """The end of the pass before may lie in it, which belongs to that plan."""
    tuner = Tuner([Candidate("overlaps", 0.27), Candidate("waiting", 0.3, waits=True)], warm_up=1)
    while tuner.opening is None:
        tuner.following()
        tuner.record(0.28)
    tuner.opened()
    tuner.following()  # the candidate's first pass, which does not count
    own = [tuner.following() for _ in range(2)]
    assert own[0] == own[1]
    assert tuner._awaited[-1] is not None
    if interrupted:
        tuner.interrupt()
    assert tuner.following() == own[0]
    assert (tuner._awaited[-1] is None) == interrupted


@pytest.mark.parametrize(("present", "tried"), [(False, [2]), (True, [])])
def test_while_steps_overlap_the_best_plan_that_waits_is_tried_whatever_was_predicted(
    present: bool, tried: list[int]
) -> None:
    candidates = [Candidate("present", 1.0, waits=present), Candidate("1.5", 1.5, waits=True)]
    tuner = Tuner([*candidates, Candidate("1.4", 1.4, waits=True)], warm_up=1)
    drive(tuner, [1.0, 1.5, 1.4])
    assert [trial.candidate for trial in tuner.trials] == tried


def test_a_plan_that_waits_is_not_tried_if_new_predictions_give_it_up() -> None:
    tuner = Tuner([Candidate("present", 1.0), Candidate("waiting", 1.0, waits=True)], warm_up=1, priced=False)
    tuner.reprice([1.0, 1.6])
    drive(tuner, [1.0, 0.5])
    assert tuner.trials == []


def test_steps_that_overlap_more_slowly_than_predicted_are_expected_of_other_plans_too() -> None:
    """So jobs in which one plan overlaps badly do not try all the others."""

    def tries(waits: bool) -> int:
        others = [Candidate(f"other {number}", 1.02) for number in range(5)]
        tried = Candidate("tried", 1.15, waits=waits, always=True)
        tuner = Tuner([Candidate("present", 1.0), tried, *others], warm_up=1)
        drive(tuner, [1.3, 1.0, *[1.3] * 5])
        assert tuner.present == 1
        return len(tuner.trials)

    assert tries(waits=True) < tries(waits=False)


def test_clearly_slower_plans_that_wait_keep_no_plan_that_overlaps_from_being_tried() -> None:
    waiting = [Candidate(f"waiting {number}", 1.0, native=True, always=True, waits=True) for number in range(2)]
    tuner = Tuner([Candidate("present", 1.0), *waiting, Candidate("overlaps", 0.8, native=True)], warm_up=1)
    drive(tuner, [1.0, 1.3, 1.3, 0.8])
    assert [trial.candidate for trial in tuner.trials] == [1, 2, 3]
    assert tuner.present == 3
