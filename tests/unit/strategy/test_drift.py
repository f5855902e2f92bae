"""A change of the links is noticed within few passes, and other changes are not taken for one."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.strategy.tuning.drift import DriftWatch, median_times
from lightning_autosync.strategy.tuning.pass_times import OverlappingTimes, OwnTimes, PassTimes


def watch(times: Iterable[tuple[float, float]], changes: int = 0) -> list[int]:
    """Windows at which links would be measured again; times are computation and wait."""
    drift = DriftWatch(changes)
    windows = [PassTimes(compute + wait, 0.0, compute) for compute, wait in times]
    return [number for number, each in enumerate(windows) if drift.record(each)]


def test_a_wait_that_doubles_a_pass_is_noticed_after_two_windows() -> None:
    assert watch([(0.1, 0.1)] * 10 + [(0.1, 0.3)] * 2) == [11]


@pytest.mark.parametrize(("wait", "windows"), [(0.145, 5), (0.13, 7), (0.055, 5)])
def test_a_smaller_change_of_the_wait_has_to_last_longer(wait: float, windows: int) -> None:
    assert watch([(0.1, 0.1)] * 10 + [(0.1, wait)] * windows) == [9 + windows]
    assert watch([(0.1, 0.1)] * 10 + ([(0.1, wait)] * (windows - 1) + [(0.1, 0.1)]) * 10) == []


def test_changes_in_both_directions_are_no_change() -> None:
    assert watch([(0.1, 0.1)] * 10 + [(0.1, 0.145), (0.1, 0.055)] * 20) == []


def test_slower_computation_is_no_change_of_the_links() -> None:
    assert watch([(0.1, 0.1)] * 10 + [(0.5, 0.1)] * 50) == []


def test_one_disturbed_window_is_no_change() -> None:
    assert watch([(0.1, 0.1)] * 10 + [(0.1, 0.9)] + [(0.1, 0.1)] * 10) == []


def test_noise_of_a_few_percent_is_no_change() -> None:
    rng = random.Random(0)
    assert watch((0.1 * rng.uniform(0.95, 1.05), 0.1 * rng.uniform(0.95, 1.05)) for _ in range(500)) == []


def test_a_change_of_a_millisecond_is_no_change_of_the_links() -> None:
    assert watch([(0.001, 0.001)] * 10 + [(0.001, 0.003)] * 50) == []


def test_changes_that_links_do_not_explain_are_noticed_ever_later() -> None:
    found = watch([(0.1, 0.1)] * 4 + [(0.1, 0.5)] * 20 + [(0.1, 0.1)] * 30 + [(0.1, 0.5)] * 40)
    assert [found[0], len(found)] == [5, 3]
    assert found[1] - 24 == 3
    assert found[2] - 54 == 7


def test_links_that_changed_before_are_measured_from_time_to_time() -> None:
    assert watch([(0.1, 0.1)] * 80, changes=1) == [9, 29, 69]


def test_an_unusual_delay_between_passes_does_not_count() -> None:
    own = OwnTimes()
    periods = [own.of(_trace(0.5 if number == 20 else 0.1)).period for number in range(30)]
    assert periods == [pytest.approx(0.5)] * 30


def test_waits_are_what_follows_the_backward_pass() -> None:
    assert OwnTimes().of(_trace(0.1)) == PassTimes(pytest.approx(0.5), 0.0, pytest.approx(0.2))


def test_a_pass_that_overlaps_counts_with_the_waits_for_its_own_sums() -> None:
    """Two plans in turn, one of whose sums come late in the next forward pass."""
    own, origin, found = OverlappingTimes(), 0.0, []
    waits = [0.2, 0.0, 0.0, 0.2]
    for wait in [*waits, 0.0]:
        begin = origin + 0.05  # the rest of the forward pass, after the last sum of the pass before
        late = begin + 0.2 + 0.05 - origin
        end = late + wait
        trace = StepTrace(
            0.05, 0.25, end, end, (), (), (), origin=origin, waits=((late, end),) if wait else (), overlapped=True
        )
        found.append(own.of(trace))
        origin += end
    assert found[0] == PassTimes(0.0, 0.0, 0.0)
    assert [each.whole for each in found[1:]] == pytest.approx([0.3 + wait for wait in waits])
    assert [each.compute for each in found[1:]] == pytest.approx([0.3] * 4)
    assert [each.unusual for each in found[1:]] == pytest.approx([0.0] * 4)


def test_medians_are_of_each_number() -> None:
    found = median_times([PassTimes(1, 5, 3), PassTimes(2, 4, 9), PassTimes(3, 6, 1)])
    assert found == PassTimes(2, 5, 3)


def _trace(forward: float) -> StepTrace:
    return StepTrace(forward, forward + 0.1, forward + 0.4, forward + 0.4, (), (), ())
