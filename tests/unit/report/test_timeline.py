"""Pictures and traces of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.report.measured import measured_timeline
from lightning_autosync.report.predict import predict
from lightning_autosync.report.timeline import draw_timelines, write_trace
from lightning_autosync.runtime.tracing import StepTrace
from lightning_autosync.simulator import MessageSpan, Span, Timeline
from lightning_autosync.workload import Variable, Workload

TIMELINE = Timeline(
    step_time=3.0,
    messages=(MessageSpan("fc", start=1.5, end=2.5, ready=1.0),),
    compute=((Span("forward", 0.0, 1.0), Span("backward", 1.0, 2.0), Span("optimizer", 2.5, 3.0)),) * 2,
    links={"a > b": 0.25},
)


@pytest.mark.parametrize(("name", "magic"), [("step.png", b"\x89PNG"), ("step.svg", b"<?xml")])
def test_two_timelines_make_one_picture(tmp_path: Path, name: str, magic: bytes) -> None:
    draw_timelines({"predicted": TIMELINE, "measured": TIMELINE}, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"\.svg or \.png"):
        draw_timelines({"predicted": TIMELINE}, tmp_path / "step.gif")


def test_a_trace_has_every_span_in_microseconds(tmp_path: Path) -> None:
    write_trace({"predicted": TIMELINE}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {(event["name"], event["tid"]): (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert spans == {
        **{("forward", rank): (0.0, 1e6) for rank in range(2)},
        **{("backward", rank): (1e6, 1e6) for rank in range(2)},
        **{("optimizer", rank): (2.5e6, 0.5e6) for rank in range(2)},
        ("wait", 2): (1e6, 0.5e6),
        ("fc", 2): (1.5e6, 1e6),
    }
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "rank 0",
        "rank 1",
        "message fc",
    }


def test_predict_names_time_bound_links_and_path(tmp_path: Path) -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(250_000,)),), backward_time=0.5)
    text = predict(builders.all_reduce(workload, cluster), workload, cluster, tmp_path)
    assert "node0 > switch" in text
    assert "least, all at once       1045.6 ms" in text
    assert "least with overlap       1545.6 ms" in text
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"timeline.svg", "timeline.png", "trace.json", "result.json"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step_time"] == pytest.approx(1.55, rel=0.02)
    assert result["step_bound"] == pytest.approx(0.5 + 1514 / 1448)
    assert result["critical_path"][0]["name"] == "backward"


def test_what_the_ranks_recorded_becomes_one_timeline() -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(8,)), Variable(name="idle", shape=(8,))))
    schedule = compile_plan(builders.all_reduce(workload, cluster, chunk_size=1), workload, cluster)
    traces = [
        StepTrace(1.0, 2.0, 3.0, 3.5, ready=(None, 1.5), started=(None, 1.6), completed=(None, 2.8)),
        StepTrace(1.1, 2.1, 3.1, 3.6, ready=(None, 1.4), started=(None, 1.5), completed=(None, 2.9)),
    ]
    timeline = measured_timeline(schedule, traces, {"a > b": 0.5})
    assert timeline.messages == (MessageSpan(schedule.messages[1].name, start=1.5, end=2.9, ready=1.5),)
    assert timeline.step_time == 3.6
    assert timeline.compute[1] == (Span("forward", 0.0, 1.1), Span("backward", 1.1, 2.1), Span("optimizer", 3.1, 3.6))
