"""A recorder notes each wait of the main thread once, and ranges of profilers cost nothing without a profiler."""

from __future__ import annotations

from typing import Any
from unittest import mock
from unittest.mock import Mock, call

import pytest
import torch
from collective_traffic import pretended_job
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, profiling, tracing
from lightning_autosync.engine.exchanges.native import AllReduceExchange
from lightning_autosync.engine.profiling import profiled
from lightning_autosync.engine.tracing import Recorder
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.workload import Variable, Workload

PAIR = ClusterSpec.uniform(2, name="pair")
ONE = Workload(name="one", variables=(Variable(name="weight", shape=(3,)),))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder whose clock goes on by a second at each look."""
    seconds = iter(range(100))
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: float(next(seconds)))
    return Recorder(1)


def test_a_wait_within_a_wait_counts_once(recorder: Recorder) -> None:
    recorder.begin_wait()
    recorder.begin_wait()
    recorder.end_wait()
    recorder.end_wait()
    recorder.begin_wait()
    recorder.end_wait()
    trace = recorder.end()
    assert trace.waits == ((1.0, 2.0), (3.0, 4.0))
    assert trace.wait == 2.0


def test_a_step_may_end_within_a_wait(recorder: Recorder) -> None:
    recorder.begin_wait()
    recorder.overlap()
    trace = recorder.end()
    assert (trace.waits, trace.overlapped) == (((1.0, 2.0),), True)
    recorder.begin()
    recorder.end_wait()
    trace = recorder.end()
    assert (trace.waits, trace.overlapped) == ((), False)


@pytest.mark.parametrize("watches", [False, True])
def test_exchanges_report_sums_only_to_a_recorder_that_asks(watches: bool) -> None:
    with pretended_job(2):
        schedule = compile_plan(builders.all_reduce(ONE, PAIR), ONE, PAIR)
        engine = Engine([("weight", nn.Parameter(torch.zeros(3)))], schedule, watched=True)
        with mock.patch.object(AllReduceExchange, "watch") as watch:
            engine.trace(Recorder(1, watches))
            engine.trace(None)
    asked, stopped = watch.call_args_list
    assert (asked.args[0] is not None) == watches
    assert stopped == call(None)


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_pass_that_waits_for_a_part_of_a_message_does_not_overlap(exchanged: bool) -> None:
    group: dict[str, Any] = {"name": "weight", "variables": ["weight"], "topology": "native"}
    if exchanged:  # an all-to-all, a sum, and an all-to-all back
        group |= {"architecture": "parameter_server", "partition": {"axis": 0, "shards": 2}, "placement": [0, 1]}
    plan = SyncPlan.from_dict({"format": "autosync-plan/1", "world_size": 2, "groups": [group]})
    recorder, weight, launched = Recorder(1), nn.Parameter(torch.zeros(3)), Mock()
    with pretended_job(2):
        engine = Engine([("weight", weight)], compile_plan(plan, ONE, PAIR), watched=True, waits="parameters")
        engine.on_launch = launched
        engine.trace(recorder)
        weight.sum().backward()
        assert engine.pending == (0,)
        engine.finish_message(0)
        engine.close()
    launched.assert_called_once_with()
    assert recorder.end().overlapped != exchanged


@pytest.mark.parametrize("asked", [False, True])
def test_a_recorder_that_asks_has_the_time_of_each_gradient_in_the_order_of_the_backward_pass(asked: bool) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model = Workload(name="two", variables=tuple(Variable(name=name, shape=(3,)) for name in ("first", "second")))
    recorder = Recorder(1, times_gradients=asked)
    with pretended_job(2):
        schedule = compile_plan(builders.all_reduce(model, PAIR), model, PAIR)
        assert schedule.messages[0].variables == ("second", "first")
        engine = Engine([("first", first), ("second", second)], schedule, watched=True)
        engine.trace(recorder)
        ((first * 2).exp() * second).sum().backward()
        engine.close()
    found = recorder.end()
    assert [(message, place) for message, place, _ in found.arrivals] == ([(0, 0), (0, 1)] if asked else [])
    times = [found.forward, *(at for *_, at in found.arrivals), found.backward]
    assert times == sorted(times)


def test_without_a_profiler_there_is_one_context_for_all_work() -> None:
    assert profiled("one", "pack") is profiled("other", "wait")


def test_pytorchs_profiler_shows_the_name_of_the_work() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found, profiled("bucket0", "pack"):
        torch.ones(2).sum()
    assert "autosync/bucket0/pack" in {event.name for event in found.events()}


def test_under_nsight_work_is_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Mock()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.setattr(profiling, "_UNDER_NSIGHT", True)
    with pytest.raises(ValueError, match="within"), profiled("{bucket}", "wait"):
        raise ValueError("within")
    assert nvtx.mock_calls == [call.range_push("autosync/{bucket}/wait"), call.range_pop()]
