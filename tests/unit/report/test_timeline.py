"""Pictures and traces of steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lightning_autosync.cluster import FRAMING, ClusterSpec
from lightning_autosync.documents import seconds_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import builders
from lightning_autosync.replay import Constants, MessageSpan, Span, Timeline
from lightning_autosync.report.predict import predict
from lightning_autosync.report.timeline import (
    MOST_ROWS,
    draw_timelines,
    timeline_rows,
    timelines_figure,
    write_trace,
)
from lightning_autosync.workload import Variable, Workload

TIMELINE = Timeline(
    step_time=3.0,
    messages=(MessageSpan("fc", start=1.5, end=2.5, ready=1.0),),
    compute=((Span("forward", 0.0, 1.0), Span("backward", 1.0, 2.0), Span("optimizer", 2.5, 3.0)),) * 2,
    links={"a > b": 0.25},
)


def test_two_timelines_make_one_picture_in_each_format(tmp_path: Path) -> None:
    starts = {"step.svg": b"<?xml", "step.png": b"\x89PNG", "again.svg": b"<?xml"}
    draw_timelines({"predicted": TIMELINE, "measured": TIMELINE}, *(tmp_path / name for name in starts))
    assert all((tmp_path / name).read_bytes().startswith(start) for name, start in starts.items())


def labels_of(names: list[str]) -> list[str]:
    spans = tuple(MessageSpan(name, 1.5, 2.5, 1.0) for name in names)
    figure = timelines_figure({"predicted": replace(TIMELINE, messages=spans)}, width=8)
    return [label.get_text() for label in figure.axes[1].get_yticklabels()]


def test_up_to_a_hundred_messages_have_a_row_each() -> None:
    names = [f"layer{number}" for number in range(MOST_ROWS)]
    assert labels_of(names) == names


def test_more_messages_share_the_row_of_their_layer_and_none_is_left_out() -> None:
    names = [f"encoder.{layer}.{part}" for layer in range(60) for part in ("attention", "output")]
    assert labels_of([*names, "head"]) == [*(f"encoder.{layer} (2)" for layer in range(60)), "head"]
    assert labels_of([f"bucket{number}" for number in range(150)])[-1] == "bucket148 to bucket149 (2)"


@pytest.mark.parametrize(("count", "most"), [(9, 4), (7, 3), (100, 7), (5, 1)])
def test_rows_have_every_message_once(count: int, most: int) -> None:
    rows = timeline_rows([f"m{number}" for number in range(count)], most)
    assert len(rows) <= most
    assert [index for _, members in rows for index in members] == list(range(count))


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"'\.gif'; allowed: \.svg, \.png"):
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


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests draw; each picture takes half a second."""
    monkeypatch.setattr("lightning_autosync.report.predict.write_timelines", lambda *_: None)


def test_predict_names_time_bound_links_and_path(tmp_path: Path) -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(250_000,)),), backward_time=0.5)
    text = predict(builders.all_reduce(workload, cluster), workload, cluster, tmp_path)
    assert "price of a byte on each\n  node0 > switch (50%), 0.5\n  switch > node0 (50%), 0.5\n  prices x b" in text
    assert "synchronization bound     1.046 s" in text
    assert "step bound                1.546 s" in text
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"timeline.svg", "timeline.png", "trace.json", "result.json"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step_time"] == pytest.approx(1.55, rel=0.02)
    assert result["step_bound"] == pytest.approx(0.5 + FRAMING)
    assert result["bounds_are"] == "exact"
    assert result["binding"] == {"node0 > switch": 0.5, "switch > node0": 0.5}
    assert result["critical_path"][0]["name"] == "backward"


@pytest.mark.usefixtures("without_pictures")
def test_predict_tells_what_batch_shares_would_give(tmp_path: Path) -> None:
    cluster = ClusterSpec.uniform(nodes=4, bandwidth=1e9)
    slow = cluster.nodes[3].model_copy(update={"speed": 0.25})
    unequal = cluster.model_copy(update={"nodes": (*cluster.nodes[:3], slow)})
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(25,)),), forward_time=1.0, backward_time=2.0)
    plan = builders.all_reduce(workload, cluster)
    assert "batch shares" not in predict(plan, workload, cluster)
    text = predict(plan, workload, unequal, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step_time"] == pytest.approx(12.0, rel=0.01)
    assert result["shared_step_time"] == pytest.approx(3.0 * 4 / 3.25, rel=0.01)
    assert f"step, batch shares   {seconds_text(result['shared_step_time']):>12}" in text


ALIKE = ClusterSpec.racks(racks=2, nodes_per_rack=40, bandwidth=1e6, uplink=1e6)
# No two links are equal, so that the ranks do not fall into classes.
LINKS = tuple(link.model_copy(update={"bandwidth": 1e6 + n}) for n, link in enumerate(ALIKE.links))
LARGE = ALIKE.model_copy(update={"links": LINKS})


def test_of_a_large_cluster_predict_states_a_cut_bound() -> None:
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(250_000,)),))
    text = predict(builders.all_reduce(workload, LARGE), workload, LARGE)
    assert "reached, cut bound)" in text
    assert "synchronization bound     2.065 s (cut bound)" in text  # 80 nodes send 2 x 79 times the size


@pytest.mark.usefixtures("without_pictures")
def test_the_share_of_the_bound_is_that_of_exact_plans(tmp_path: Path) -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(250_000,)),))
    text = predict(builders.all_reduce(workload, cluster, compressor="bf16"), workload, cluster, tmp_path)
    assert "1.046 s (of exact plans; this one is compressed)" in text
    assert "reached" not in text
    assert json.loads((tmp_path / "result.json").read_text())["bound_share"] is None


@pytest.mark.usefixtures("without_pictures")
def test_the_bound_of_a_table_counts_the_rows_that_travel(tmp_path: Path) -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    table = Variable(name="table", shape=(250_000, 1), kind="row_sparse", rows=2_500)
    workload = Workload(name="rows", variables=(table,))
    predict(builders.all_reduce(workload, cluster), workload, cluster, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["synchronization_bound"] == pytest.approx(0.01 * FRAMING)
    assert 0 < result["bound_share"] <= 1


@pytest.mark.usefixtures("without_pictures")
def test_the_bound_of_links_with_bursts_has_them(tmp_path: Path) -> None:
    cluster = ClusterSpec.uniform(nodes=2, bandwidth=1e6)
    workload = Workload(name="one", variables=(Variable(name="fc", shape=(250_000,)),), forward_time=1.0)
    plan = builders.packed_trees(workload, cluster)
    predict(plan, workload, cluster, tmp_path, Constants(burst=128 * 1024))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step_bound"] == pytest.approx(1 + FRAMING - 0.131072)
    assert 0.9 < result["bound_share"] <= 1


def test_links_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    draw_timelines({"measured": replace(TIMELINE, links={})}, tmp_path / "step.svg")
    assert "<!-- links: not measured -->" in (tmp_path / "step.svg").read_text()


def test_a_picture_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Figure, target: Any, **arguments: Any) -> None:
        Path(target).write_bytes(b"half") if isinstance(target, str | Path) else target.write(b"half")
        raise OSError("disk full")

    (tmp_path / "step.png").write_bytes(b"before")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_timelines({"predicted": TIMELINE}, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1
