"""When a job uses its former plan for two passes, and what their times show."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.strategy.tuning.drift import DriftWatch
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.pass_times import PassTimes
from lightning_autosync.strategy.tuning.recovery import LEAST, Excursions, FormerPlan

USUAL, SLOWED = PassTimes(0.15, 0.0, 0.05), PassTimes(0.27, 0.0, 0.05)
PRESENT = 0.2


def excursions(warm_up: int = 0) -> Excursions:
    return Excursions(FormerPlan(mock.Mock(), USUAL, SLOWED), warm_up)


def run(
    found: Excursions,
    seconds: float,
    present: float = PRESENT,
    compute: float = 0.05,
    first: float = 0.0,
    opens: int = 4,
) -> list[str]:
    """What the passes of an excursion tell; the first one takes ``first`` seconds if that is given."""
    plans = [found.following() for _ in range(opens)]
    found.opened()
    plans += [found.following() for _ in range(5)]
    assert plans == [False] * opens + [True, True, False, False, False]
    times = [PassTimes(present, 0.0, 0.05)] * len(plans)
    times[opens : opens + 2] = PassTimes(first or seconds, 0.0, compute), PassTimes(seconds, 0.0, compute)
    return [found.record(former, each) for former, each in zip(plans, times, strict=True)]


def next_after(begin: int, **options: Any) -> int:
    """The pass at which the excursion after one that begins at a pass may begin."""
    found = excursions()
    found.begin(begin)
    run(found, **options)
    assert not found.under_way
    return next(passes for passes in range(begin, 10**6) if found.is_due(passes, PRESENT))


def test_the_last_pass_of_an_excursion_tells_whether_links_have_recovered() -> None:
    found = excursions()
    found.begin(LEAST)
    *_, first, last, _, _, _ = run(found, 0.16, first=0.9)
    assert first == ""  # its buffers and connections are new
    words = "0.16 s, as against 0.27 s after links became slower and 0.15 s before"
    assert last == f"steps with the earlier plan are fast again: {words}"


@pytest.mark.parametrize(("seconds", "recovered"), [(0.15, True), (0.2, True), (0.22, False), (0.27, False)])
def test_links_have_recovered_if_the_former_plan_is_nearer_to_its_usual_time(seconds: float, recovered: bool) -> None:
    found = excursions()
    found.begin(LEAST)
    assert any(run(found, seconds)) == recovered


@pytest.mark.parametrize(("seconds", "recovered"), [(0.25, True), (0.37, False)])
def test_computation_that_takes_longer_now_does_not_count(seconds: float, recovered: bool) -> None:
    found = excursions()
    found.begin(LEAST)
    assert any(run(found, seconds, compute=0.15)) == recovered


@pytest.mark.parametrize(("warm_up", "first"), [(0, LEAST), (10, LEAST), (LEAST + 9, LEAST + 10)])
def test_the_first_excursion_comes_after_the_warm_up(warm_up: int, first: int) -> None:
    found = excursions(warm_up)
    assert not found.is_due(first - 1, SLOWED.period)
    assert found.is_due(first, SLOWED.period)
    found.begin(first)
    assert not found.is_due(first, SLOWED.period)


def test_the_first_excursion_is_expected_to_take_as_long_as_passes_right_after_the_change() -> None:
    """Its two passes take 0.14 s longer than those of the present plan. As long as these are not known, none is due."""
    first = round(0.14 / (0.02 * PRESENT))
    assert first > LEAST
    assert not excursions().is_due(first - 1, PRESENT)
    assert excursions().is_due(first, PRESENT)
    assert not excursions().is_due(10**6, math.nan)


def test_excursions_take_at_most_two_hundredths_of_the_time() -> None:
    """Each of these lasts 1.6 s longer than two passes of the present plan, which takes 0.2 s."""
    assert next_after(100, seconds=1.0) == 100 + round(1.6 / (0.02 * 0.2))
    assert next_after(100, seconds=0.22) == 100 + LEAST


def test_the_former_plan_is_opened_in_a_third_of_the_time_at_most() -> None:
    assert next_after(100, seconds=0.22, opens=200) == 100 + 600


def test_after_an_excursion_in_vain_the_next_one_comes_later() -> None:
    """If links had changed, there would be no next one."""
    assert next_after(100, seconds=0.16) == 100 + 2 * LEAST


def test_without_a_former_plan_or_if_it_cannot_be_opened_no_excursion_is_due() -> None:
    assert not Excursions(None).is_due(10**6, PRESENT)
    found = excursions()
    found.begin(LEAST)
    found.give_up()
    assert not found.under_way
    assert not found.is_due(10**6, PRESENT)


def slowing(times: list[float], **options: Any) -> list[tuple[PassTimes, PassTimes] | None]:
    """What a watch says of slower passes, after each window that is a reason to measure links."""
    drift = DriftWatch(**options)
    return [drift.slowing for each in times if drift.record(PassTimes(each, 0.0, 0.05))]


def test_the_watch_tells_the_times_before_and_after_links_became_slower() -> None:
    assert slowing([0.2] * 4 + [0.4] * 2) == [(PassTimes(0.2, 0.0, 0.05), PassTimes(0.4, 0.0, 0.05))]
    assert slowing([0.3] * 2, remembered=0.2) == [(PassTimes(0.2, 0.0, 0.05), PassTimes(0.3, 0.0, 0.05))]


def test_it_tells_none_if_links_became_faster_or_are_measured_from_time_to_time() -> None:
    assert slowing([0.4] * 4 + [0.2] * 4) == [None]
    assert slowing([0.2] * 10, changes=1) == [None]


def test_with_excursions_links_are_measured_far_more_rarely_from_time_to_time() -> None:
    assert len(slowing([0.2] * 79, changes=1, excursions=True)) == 0
    assert len(slowing([0.2] * 80, changes=1, excursions=True)) == 1
    drift = DriftWatch(changes=1, excursions=True)
    drift.expect_no_excursions()
    assert any(drift.record(PassTimes(0.2, 0.0, 0.05)) for _ in range(10))


@pytest.mark.parametrize(("slowed", "tells"), [(0.74, True), (0.76, False)])
def test_a_plan_that_became_more_than_five_times_as_slow_is_not_used(slowed: float, tells: bool) -> None:
    """Each of its passes would hold the training up, and excursions would have to be rare."""
    tuning: Any = object.__new__(JobTuning)
    tuning._former = FormerPlan(resolution("a"), USUAL, PassTimes(slowed, 0.0, 0.05))
    tuning._resolution = resolution("b")
    assert (tuning._telling_plan() is not None) == tells


def resolution(plan: str, paced: bool = False, parameters: str = "of a model") -> Resolution:
    schedule: Any = SimpleNamespace(messages=[SimpleNamespace(on_trees=False), SimpleNamespace(on_trees=paced)])
    workload: Any = SimpleNamespace(fingerprint=parameters)
    return Resolution(workload, mock.Mock(), plan, schedule, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("former", "now", "tells"),
    [
        (resolution("a"), resolution("b"), True),
        (resolution("a"), resolution("a"), False),  # its own steps become faster with the links
        (resolution("a", paced=True), resolution("a", paced=True), True),
        (resolution("a", parameters="some more"), resolution("b"), False),
        (None, resolution("b"), False),
    ],
)
def test_the_former_plan_is_used_if_it_tells_more_than_the_present_one(
    former: Resolution | None, now: Resolution, tells: bool
) -> None:
    tuning: Any = object.__new__(JobTuning)
    tuning._former = None if former is None else FormerPlan(former, USUAL, SLOWED)
    tuning._resolution = now
    assert tuning._telling_plan() is (tuning._former if tells else None)
