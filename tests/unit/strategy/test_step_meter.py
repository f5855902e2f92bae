"""Figures of steps follow from their traces."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.plan import Schedule, builders, compile_plan
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.exact import ExactReplica
from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning import step_meter
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.report import MeasuredSteps, TuningReport
from lightning_autosync.strategy.tuning.step_meter import StepFigures, StepMeter, overlap
from lightning_autosync.workload import Variable, Workload

PAIR = ClusterSpec.uniform(2, bandwidth="1 Gbit/s", name="pair")
WORKLOAD = Workload(name="one", variables=(Variable(name="weight", shape=(10**6,), dtype="float32"),))
SENT = 4e6
"""Bytes of the gradients, and of what one of two ranks sends and receives."""
FREE = Constants(framing=1.0)


def trace(
    *spans: tuple[float | None, float | None],
    forward: float = 0.1,
    backward: float = 0.3,
    end: float = 0.5,
    origin: float = 0.0,
) -> StepTrace:
    started, completed = tuple(start for start, _ in spans), tuple(stop for _, stop in spans)
    return StepTrace(forward, backward, end, end, started, started, completed, origin, waits=((backward, end),))


def resolution(cluster: ClusterSpec = PAIR, builder: str = "all_reduce") -> Resolution:
    plan = builders.build(builder, WORKLOAD, cluster)
    return Resolution(WORKLOAD, cluster, plan, compile_plan(plan, WORKLOAD, cluster), "test")


def schedule_of(found: Resolution) -> Schedule:
    assert found.schedule is not None
    return found.schedule


def figures(*traces: StepTrace, found: Resolution | None = None) -> StepFigures:
    found = found or resolution()
    meter = StepMeter(0)
    for each in traces:
        meter.add(each, schedule_of(found))
    taken = meter.take(found, FREE, 3)
    assert taken is not None
    return taken


def test_times_are_medians_so_that_a_pause_does_not_count() -> None:
    found = figures(trace(end=0.5), trace(end=9.0, origin=0.5), trace(end=0.4, origin=9.5))
    assert found.step_time == pytest.approx(0.5)
    assert found.wait == pytest.approx(0.2)
    assert found.plan_changes == 3


@pytest.mark.parametrize("count", [9, 10])
def test_long_and_short_steps_in_turn_count_half(count: int) -> None:
    ends = [0.064, 0.024] * 5
    origins = [sum(ends[:number]) for number in range(count)]
    steps = [
        trace(forward=0.0, backward=0.01, end=end, origin=origin)
        for end, origin in zip(ends[:count], origins, strict=True)
    ]
    assert figures(*steps).step_time == pytest.approx(0.044)
    paused = [*steps, trace(forward=0.0, backward=0.01, end=9.0, origin=sum(ends[:count]))]
    assert figures(*paused).step_time == pytest.approx(0.044)


def test_work_between_two_steps_belongs_to_the_step_time() -> None:
    meter, found = StepMeter(0), resolution()
    for origin in (0.0, 0.7, 1.4):  # 0.2 s lie between the end of each synchronization and the next trace
        meter.add(trace(end=0.5, origin=origin), schedule_of(found))
    taken = meter.take(found, FREE, 0)
    assert taken is not None
    assert taken.step_time == pytest.approx(0.7)
    meter.add(trace(end=0.5, origin=2.1), schedule_of(found))
    taken = meter.take(found, FREE, 0)
    assert taken is not None
    assert taken.step_time == pytest.approx(0.7)


def test_memory_is_bounded_if_nobody_asks_for_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_meter, "_MOST", 3)
    slow = [trace(end=9.0, origin=9.0 * step) for step in range(9)]
    assert figures(*slow, *(trace(origin=81.0 + step) for step in range(3))).wait == pytest.approx(0.2)


def test_models_on_accelerators_are_not_timed() -> None:
    replica = object.__new__(ExactReplica)
    replica._engine, replica._tuning = Mock(), Mock()
    for device, timed in (("meta", False), ("cpu", True)):
        replica._module = nn.Linear(1, 1, device=device)
        assert replica.measure_steps() is timed
        assert replica._tuning.measure_steps.called is timed


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0.1, 0.2)], 1.0),
        ([(0.3, 0.5)], 0.0),
        ([(0.2, 0.4)], 0.5),
        ([(0.2, 0.4), (0.2, 0.4)], 0.5),
        ([(0.1, 0.4), (0.2, 0.3)], 2 / 3),
        ([(0.1, 0.2), (0.4, 0.5)], 0.5),
        ([(0.2, 0.4), (None, None)], 0.5),
    ],
)
def test_overlap_counts_each_moment_with_a_message_under_way_once(spans: list, share: float) -> None:
    assert overlap(trace(*spans)) == pytest.approx(share)


def test_overlap_is_unknown_without_a_message() -> None:
    assert overlap(trace((None, None))) is None
    assert "overlap" not in figures(trace((None, None))).metrics()


def test_bytes_are_those_of_the_plans_that_synchronized_the_steps() -> None:
    one, other = resolution(), resolution(builder="ps")
    meter, rank = StepMeter(1), 1
    for number, each in enumerate((one, other, other)):
        meter.add(trace(origin=number), schedule_of(each))
    found = meter.take(other, FREE, 0)
    sent = [sent_bytes(schedule_of(each)) for each in (one, other)]
    assert found is not None
    assert sent[0] is not None
    assert sent[1] is not None
    assert found.bytes == pytest.approx((sent[0][rank] + 2 * sent[1][rank]) / 3)
    assert meter.take(other, FREE, 0) is None


def test_share_of_bound_is_the_least_step_time_over_the_measured_one() -> None:
    # 4 MB take 32 ms at 1 Gbit/s in each direction, and cannot start before the forward pass has ended.
    seconds = 8 * SENT / 1e9
    computing = figures(trace(forward=0.1, backward=0.3, end=0.5))
    assert computing.share_of_bound == pytest.approx((0.3 + seconds) / 0.5, rel=0.01)
    alone = figures(trace(forward=0.0, backward=0.0, end=2 * seconds))
    assert alone.share_of_bound == pytest.approx(0.5, rel=0.01)


def test_share_of_bound_is_unknown_without_rates() -> None:
    unknown = ClusterSpec.uniform(2)
    assert figures(trace(), found=resolution(unknown)).share_of_bound is None


def test_share_of_bound_is_left_out_on_one_node_where_no_link_limits_a_step() -> None:
    alone = ClusterSpec.uniform(1, devices=2, bandwidth="1 Gbit/s")
    assert alone.measured
    assert "share_of_bound" not in figures(trace(), found=resolution(alone)).metrics()


def overlapped(*waits: tuple[float, float], end: float = 1.0) -> StepTrace:
    """A step whose message leaves at 0.3, at the end of the backward pass, and comes at 0.7, in the next forward."""
    return StepTrace(0.1, 0.3, 0.7, end, (0.2,), (0.3,), (0.7,), waits=waits, overlapped=True)


def test_a_step_that_overlaps_waits_only_where_its_forward_pass_needs_gradients() -> None:
    assert overlap(overlapped()) == 1.0
    assert overlap(overlapped((0.3, 0.4), (0.6, 0.9))) == pytest.approx(0.5)
    meter, found = StepMeter(0, overlaps=True), resolution()
    meter.add(overlapped((0.3, 0.4), (0.6, 0.7)), schedule_of(found))
    meter.add(trace(), schedule_of(found))
    taken = meter.take(found, FREE, 0)
    assert taken is not None
    assert taken.overlapped_steps == 0.5
    assert taken.wait == pytest.approx(0.2)
    assert figures(trace()).overlapped_steps is None


@pytest.mark.parametrize(("waited", "least"), [(0.1, 0.6), (0.69, 8 * SENT / 1e9)])
def test_the_bound_of_steps_that_overlap_is_computation_or_communication(waited: float, least: float) -> None:
    found = figures(overlapped((0.0, waited)))
    assert found.step_time == pytest.approx(0.7)
    assert found.share_of_bound == pytest.approx(least / 0.7, rel=0.02)


def test_the_page_gets_a_step_of_usual_length_and_all_figures() -> None:
    meter, found = StepMeter(0), resolution()
    assert meter.typical is None
    origin = 0.0
    for end in (0.5, 0.5, 9.0):
        meter.add(trace(end=end, origin=origin), schedule_of(found))
        origin += end
        meter.take(found, FREE, 0)
    assert meter.typical is not None
    assert meter.typical[0].synchronized == 0.5
    assert [steps for steps, _ in meter.history] == [1, 2, 3]


@pytest.mark.parametrize(("speedup", "share"), [(1.0, "90%"), (1.5, "")])
def test_steps_that_are_faster_than_links_allow_are_told_and_are_no_share_of_the_bound(
    tmp_path: Path, speedup: float, share: str
) -> None:
    found, seconds = resolution(), 8 * SENT / 1e9
    meter = StepMeter(0)
    for origin in range(2):
        end = seconds / (0.9 * speedup)
        meter.add(trace((0.0, end), forward=0.0, backward=0.0, end=end, origin=end * origin), schedule_of(found))
        meter.take(found, FREE, 0)
    assert meter.typical is not None
    measured = MeasuredSteps(0, tuple(meter.history), *meter.typical)
    report = TuningReport("1234", "test", "2 hosts, described", [], [], "none", found, FREE, measured)
    report.save(tmp_path / "page.html")
    page, told = (tmp_path / "page.html").read_text(), "too low: steps are 1.35x as fast as any exact plan could"
    assert (f"\nrates of links: {told}" in str(report)) is not bool(share)
    assert (f"1 Gbit/s, {told}" in page) is not bool(share)
    assert ("of the speed bound" in page) is bool(share)
    assert f"<dd>{share}</dd>" in page or not share


def test_a_plan_that_was_not_predicted_has_no_predicted_time_in_reports(tmp_path: Path) -> None:
    found = resolution()
    plans = [Alternative(found.plan, "known", 0.25), Alternative(found.plan, "unknown", math.nan)]
    job = JobTuning(nn.Linear(1, 1), StrategySettings(), 2, 1, None, None)
    job._resolution = replace(found, alternatives=plans)
    report = job.report()
    assert report.candidates == [("known", 0.25), ("unknown", None)]
    report.save(tmp_path / "page.html")
    rows = [line for line in (tmp_path / "page.html").read_text().splitlines() if "known</th>" in line]
    assert ["250 ms" in row for row in rows] == [True, False]
    assert rows[1].endswith('<td class="number"></td></tr>')


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_page_says_that_its_prediction_does_not_overlap(tmp_path: Path, overlaps: bool) -> None:
    meter, found = StepMeter(0), resolution()
    for origin in range(2):
        seen = overlapped((0.0, 0.1)) if overlaps else trace((0.3, 0.45))
        meter.add(replace(seen, origin=float(origin)), schedule_of(found))
        meter.take(found, FREE, 0)
    assert meter.typical is not None
    measured = MeasuredSteps(0, tuple(meter.history), *meter.typical)
    report = TuningReport("1234", "test", "2 hosts, described", [], [], "none", found, FREE, measured)
    report.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "predicted" in page
    assert ("; predicted, not overlapped " in page) is overlaps
