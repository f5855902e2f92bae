"""The predicted time of steps that overlap with the next forward pass, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import (
    Constants,
    MessageSpan,
    Prediction,
    Replay,
    Span,
    Timeline,
    least_overlapped_step,
    overlapped_step,
    overlapped_step_time,
    overlapped_timeline,
)
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.uniform(2, bandwidth=1e6)
WORKLOAD = Workload(
    name="two",
    variables=(Variable(name="first", shape=(250_000,), ready=2.0), Variable(name="last", shape=(250_000,), ready=1.0)),
    forward_time=1.0,
    backward_time=2.0,
    optimizer_time=0.25,
)
SCHEDULE = compile_plan(builders.build("all_reduce", WORKLOAD, CLUSTER, bucket_bytes=1), WORKLOAD, CLUSTER)


def predicted(first: float, last: float, busy: float = 0.0) -> Prediction:
    """Messages that end so many seconds after the backward pass, on links that are busy for so long."""
    ends = {"first": 3.0 + first, "last": 3.0 + last}
    spans = tuple(
        MessageSpan(message.name, 1.5, ends[message.variables[0]], ready=1.5) for message in SCHEDULE.messages
    )
    compute = (Span("forward", 0.0, 1.0), Span("backward", 1.0, 3.0), Span("optimizer", 4.0, 4.25))
    timeline = Timeline(4.25, spans, (compute, compute), {})
    demand = numpy.full((2, 3), busy / 2)
    return Prediction(4.25, 1.0, timeline, (0.0, 0.0), None, (), demand, frames=2, taking=(0.0, 0.0), passing=0.0)


@pytest.mark.parametrize(
    ("prediction", "seconds"),
    [
        (predicted(-1.0, -1.5), 1.0 + 2.0 + 0.25),  # nothing is left to wait for
        (predicted(0.2, 0.4), 0.2 + 1.0 + 2.0 + 0.25),  # the last layer's message comes while the first one runs
        (predicted(0.2, 0.9), 0.9 + 0.5 + 2.0 + 0.25),
        (predicted(0.2, 0.4, busy=5.0), 5.0),
    ],
)
def test_layers_wait_for_their_own_messages(prediction: Prediction, seconds: float) -> None:
    assert overlapped_step(SCHEDULE, WORKLOAD, prediction) == pytest.approx(seconds)


def test_a_main_thread_takes_sums_and_makes_steps_while_it_waits() -> None:
    # "last" has come when the first layer waits for "first", 0.2 s after the backward pass.
    costs = {"first": 0.03, "last": 0.05}
    taking = tuple(costs[message.variables[0]] for message in SCHEDULE.messages)
    found = overlapped_step(SCHEDULE, WORKLOAD, replace(predicted(0.2, -1.0), taking=taking))
    assert found == pytest.approx(0.2 + 0.03 + 1.0 + 2.0 + 0.25)
    found = overlapped_step(SCHEDULE, WORKLOAD, replace(predicted(-1.0, -1.0), taking=taking, passing=0.01))
    assert found == pytest.approx(0.01 + 0.03 + 0.05 + 1.0 + 2.0 + 0.25)


def test_a_layer_may_need_several_messages_of_which_some_are_taken_while_it_waits() -> None:
    together = tuple(each.model_copy(update={"ready": 2.0}) for each in WORKLOAD.variables)
    workload = WORKLOAD.model_copy(update={"variables": together})
    taking = (0.05, 0.03)  # of the messages by index; both are needed by the only layer
    prediction = predicted(0.0, 0.0)
    spans = tuple(
        replace(span, end=3.0 + after) for span, after in zip(prediction.timeline.messages, (0.2, -1.0), strict=True)
    )
    prediction = replace(prediction, timeline=replace(prediction.timeline, messages=spans), taking=taking)
    found = overlapped_step(SCHEDULE, workload, prediction)
    assert found == pytest.approx(0.2 + 0.05 + 1.0 + 2.0 + 0.25)


def test_a_replayed_step_is_never_slower_with_overlap() -> None:
    for builder in ("all_reduce", "packed_trees", "byteps"):
        schedule = compile_plan(builders.build(builder, WORKLOAD, CLUSTER), WORKLOAD, CLUSTER)
        prediction = Replay(WORKLOAD, CLUSTER).predict(schedule)
        found = overlapped_step(schedule, WORKLOAD, prediction)
        assert 3.25 <= found <= prediction.step_time + 1e-9


def test_messages_that_the_engine_waits_for_do_not_overlap() -> None:
    waiting = tuple(
        replace(message, rounds=message.rounds * 2) if message.variables == ("last",) else message
        for message in SCHEDULE.messages
    )
    found = overlapped_step(replace(SCHEDULE, messages=waiting), WORKLOAD, predicted(0.2, 0.4))
    assert found == pytest.approx(0.4 + 1.0 + 2.0 + 0.25)


def test_a_timeline_shows_when_layers_run_and_what_they_wait_for() -> None:
    replay = Replay(WORKLOAD, CLUSTER)
    found = overlapped_timeline(SCHEDULE, WORKLOAD, replay, predicted(0.2, 0.9))
    assert found.step_time == pytest.approx(0.9 + 0.5 + 2.0 + 0.25)
    for spans in found.compute:
        assert [span.name for span in spans] == ["backward", "forward", "forward", "optimizer"]
        assert [span.start for span in spans] == pytest.approx([0.0, 2.2, 2.9, 3.4])
        assert [span.end for span in spans] == pytest.approx([2.0, 2.7, 3.4, found.step_time])
    ends = {message.variables[0]: span.end for message, span in zip(SCHEDULE.messages, found.messages, strict=True)}
    assert ends == pytest.approx({"first": 2.2, "last": 2.9})


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("builder", ["all_reduce", "packed_trees", "byteps"])
def test_a_timeline_is_as_long_as_the_step(builder: str, waits: bool) -> None:
    schedule = compile_plan(builders.build(builder, WORKLOAD, CLUSTER), WORKLOAD, CLUSTER)
    schedule, replay = replace(schedule, waits=waits), Replay(WORKLOAD, CLUSTER)
    prediction = replay.predict(schedule)
    timeline = overlapped_timeline(schedule, WORKLOAD, replay, prediction)
    assert timeline.step_time == overlapped_step_time(schedule, WORKLOAD, replay, prediction)
    carried = {name: share * timeline.step_time for name, share in timeline.links.items()}
    usual = {name: share * prediction.step_time for name, share in prediction.timeline.links.items()}
    assert carried == pytest.approx(usual)
    assert 0.0 <= max(span.end for spans in timeline.compute for span in spans) <= timeline.step_time + 1e-9


@pytest.mark.parametrize(
    ("sizes", "passes", "seconds"),
    [
        ((250_000, 250_000), (1.0, 2.0), 1.0 + 3.0),  # the first layer's gradient is ready last and needed first
        ((25_000, 475_000), (1.0, 2.0), 2.0 + 1.5),  # that of the second one has only this layer's passes less
        ((25_000, 25_000), (1.0, 2.0), 3.25),  # computation alone
        ((250_000, 250_000), (0.0, 0.0), 2.0),  # the wire alone
    ],
)
def test_bound_of_steps_that_overlap(sizes: tuple[int, int], passes: tuple[float, float], seconds: float) -> None:
    forward, backward = passes
    variables = tuple(
        Variable(name=name, shape=(size,), ready=share * backward)
        for name, size, share in zip(("first", "last"), sizes, (1.0, 0.5), strict=True)
    )
    workload = Workload(
        name="two", variables=variables, forward_time=forward, backward_time=backward, optimizer_time=0.25
    )
    assert least_overlapped_step(workload, CLUSTER) == pytest.approx(seconds)


@pytest.mark.parametrize(("size", "seconds"), [(30_000, 1.1), (300_000, 1.2 + 0.1 + 0.4)])
def test_bound_where_the_last_gradient_is_ready_before_backward_ends(size: int, seconds: float) -> None:
    variables = (Variable(name="first", shape=(size,), ready=0.4), Variable(name="last", shape=(1,), ready=0.1))
    workload = Workload(name="two", variables=variables, forward_time=0.1, backward_time=1.0)
    least = least_overlapped_step(workload, CLUSTER)
    assert least == pytest.approx(seconds)
    schedule = compile_plan(builders.build("all_reduce", workload, CLUSTER, bucket_bytes=1), workload, CLUSTER)
    prediction = Replay(workload, CLUSTER, Constants.ideal()).predict(schedule)
    assert overlapped_step(schedule, workload, prediction) >= least - 1e-9
