"""A change of the links is noticed within few passes, and other changes are not taken for one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from clusters import two_interfaces

from lightning_autosync.cluster import ClusterSpec, pack_trees
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.tuning import job_tuning, live
from lightning_autosync.strategy.tuning.drift import DriftWatch, median_times
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.pass_times import OverlappingTimes, OwnTimes, PassTimes
from lightning_autosync.strategy.tuning.proposals import DESCRIBED, JobLinks


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


def test_of_passes_that_overlap_only_long_delays_do_not_count() -> None:
    """What messages cost the next forward pass varies, and is part of the price of overlap."""
    own, origin, found = OverlappingTimes(), 0.0, []
    gaps = [0.05] * 8 + [0.07, 1.05, 0.05]
    for gap in gaps:
        found.append(own.of(StepTrace(0.05, 0.25, 0.25, 0.25, (), (), (), origin=origin, overlapped=True)).unusual)
        origin += 0.25 + gap
    assert found == pytest.approx([0.0] * 10 + [1.0])


def test_medians_are_of_each_number() -> None:
    found = median_times([PassTimes(1, 5, 3), PassTimes(2, 4, 9), PassTimes(3, 6, 1)])
    assert found == PassTimes(2, 5, 3)


@pytest.mark.parametrize("passes", [3, 5])
def test_one_pause_in_a_window_does_not_count_on_any_rank(passes: int) -> None:
    for place in range(passes):
        for unusual in (20.0, 0.0):  # on the rank that paused, and on those that waited for it
            times = [PassTimes(0.2, 0.0, 0.1)] * passes
            times[place] = PassTimes(20.2, unusual, 0.1)
            assert median_times(times).period == 0.2


def _trace(forward: float) -> StepTrace:
    return StepTrace(forward, forward + 0.1, forward + 0.4, forward + 0.4, (), (), ())


@pytest.mark.parametrize(("period", "measured"), [(0.3, True), (0.21, False), (0.19, False), (0.05, False)])
def test_links_are_measured_if_steps_are_much_longer_than_remembered(period: float, measured: bool) -> None:
    drift = DriftWatch(remembered=0.2)
    reasons = [drift.record(PassTimes(period, 0.0, period)) for _ in range(2)]
    assert [bool(reason) for reason in reasons] == [False, measured]


@pytest.mark.parametrize(("period", "measured"), [(0.3, True), (0.21, False), (0.05, False)])
def test_so_they_are_if_steps_are_much_longer_than_before_trials(period: float, measured: bool) -> None:
    drift = DriftWatch(remembered=0.4)
    drift.compare_with(0.2, "before")
    reasons = [drift.record(PassTimes(period, 0.0, period)) for _ in range(20)]
    assert [reason for reason in reasons if reason] == [f"a step takes {period} s, and 0.2 s before"] * measured


def test_a_change_that_shows_in_the_pass_with_which_trials_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = live.LiveTuner.__new__(live.LiveTuner)
    times = mock.Mock(under_way=1)
    found: dict[str, Any] = {"_times": times, "_tuner": mock.Mock(trials=[]), "_awaited": deque([None])}
    vars(tuner).update(found, _chosen=deque([live._END]))
    monkeypatch.setattr(live.LiveTuner, "_reprice", mock.Mock())
    monkeypatch.setattr(live.LiveTuner, "_watch_in_trials", lambda *_: "steps wait longer")
    monkeypatch.setattr(live.LiveTuner, "_finish", finish := mock.Mock())
    assert tuner._try(mock.Mock()) == "steps wait longer"
    finish.assert_called_once()


def measured_again(
    monkeypatch: pytest.MonkeyPatch, described: ClusterSpec, seen: ClusterSpec, first: Any = None
) -> tuple[bool, ClusterSpec, str]:
    """What a job does that has a description and measures other links: whether they changed, its cluster, its words.

    ``first`` is what rank 0 found, if this rank is another one.
    """
    tuning: Any = object.__new__(JobTuning)
    tuning._settings = SimpleNamespace(tuning=SimpleNamespace(probe=1.0), timeout=1.0)
    tuning._shape, tuning._checks, tuning._changes = (len(described.nodes), 1), [], 0
    tuning.links = JobLinks(described, Constants(), origin=DESCRIBED)
    monkeypatch.setattr(job_tuning, "find_links", lambda *_: JobLinks(seen, Constants(), origin="measured"))
    monkeypatch.setattr(job_tuning, "rank_zero_info", lambda _: None)
    tuning._group = None
    monkeypatch.setattr(job_tuning.dist, "get_rank", lambda _: 0 if first is None else 1)
    monkeypatch.setattr(job_tuning, "broadcast_json", lambda own, _: own if first is None else first)
    changed = tuning._measure_again("a test says so")
    assert tuning._changes == changed
    return changed, tuning.links.cluster, tuning._checks[0].partition("because a test says so. ")[2]


def test_further_interfaces_are_kept_when_the_first_one_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both interfaces, the packed rate falls by a tenth of the first one's part; the first one alone has half."""
    described = two_interfaces([1e7] * 4, [1e7] * 4)
    changed, cluster, told = measured_again(monkeypatch, described, ClusterSpec.star([1e7, 1e7, 1e7, 6e6]))
    assert changed
    assert "Node n3 sends to all others at 48 Mbit/s, but 80 Mbit/s before." in told
    assert cluster.interface_count == 2
    assert pack_trees(cluster).rate > 0.85 * pack_trees(described).rate


def test_what_is_not_measured_is_not_said_to_be_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    described = two_interfaces([1e7] * 4, [1e7] * 4)
    changed, cluster, told = measured_again(monkeypatch, described, ClusterSpec.star([1e7] * 4))
    assert not changed
    assert cluster is described
    assert told == "Those of the first interface, which alone are measured, have not changed."


def test_hosts_that_were_described_as_several_nodes_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "one", "nodes": [{"name": "h", "devices": 2}]})
    described = ClusterSpec.star([1e7, 1e7])
    changed, cluster, told = measured_again(monkeypatch, described, one)
    assert not changed
    assert cluster is described
    assert told == "Ranks 0, 1 run on host h, but are described on node0 and node1."


def test_links_of_one_interface_are_replaced_by_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ClusterSpec.star([1e7, 1e7, 2e6])
    assert measured_again(monkeypatch, ClusterSpec.star([1e7] * 3), seen)[:2] == (True, seen)


@pytest.mark.parametrize("changes", [False, True])
def test_rank_0_tells_the_others_whether_links_have_changed(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """Unlike processors may round the same measurement differently."""
    described, other = ClusterSpec.star([1e7] * 3), ClusterSpec.star([1e7, 1e7, 2e6])
    told = ["words of rank 0", other.to_dict() if changes else None]
    found = measured_again(monkeypatch, described, described if changes else other, told)
    assert found == (changes, other if changes else described, "words of rank 0")
