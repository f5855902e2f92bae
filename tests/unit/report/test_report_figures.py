"""Parts of the pictures in reports, by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from clusters import two_interfaces

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import Group, Partition, SyncPlan, builders, compile_plan
from lightning_autosync.replay import Constants, MessageSpan, Replay, Span, Timeline
from lightning_autosync.report.figures.cluster import MOST_NODES, Traffic, cluster_picture
from lightning_autosync.report.figures.picture import INK, Picture, new_figure, report_style, spread
from lightning_autosync.report.figures.plan import MOST_ROWS, interface_shares, method_of, plan_picture, reducers
from lightning_autosync.report.figures.tuning import origin_looks
from lightning_autosync.report.plan_view import PlanView, message_rows
from lightning_autosync.report.timeline import load_timelines, save_timelines
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.star(bandwidths=["400 Mbit/s", *["100 Mbit/s"] * 3])
WORKLOAD = Workload(
    name="two",
    variables=(Variable(name="a", shape=(750_000,)), Variable(name="b", shape=(250_000,))),
    backward_time=0.1,
)


def plan_of(**fields: object) -> SyncPlan:
    return SyncPlan(world_size=4, groups=(Group(name="all", variables=("b", "a"), **fields),))


@pytest.mark.parametrize(
    ("fields", "method", "shares"),
    [
        ({}, "backend's all-reduce", [0.25] * 4),
        ({"topology": "ring"}, "ring", [0.25] * 4),
        ({"topology": "halving_doubling"}, "halving and doubling", [0.25] * 4),
        (
            {"architecture": "parameter_server", "topology": "star", "placement": [2]},
            "servers, star",
            [0, 0, 1, 0],
        ),
        (
            {
                "architecture": "parameter_server",
                "partition": Partition(shards=2, weights=(3, 1)),
                "placement": [0, 3],
                "compressor": "bf16",
            },
            "all-to-all with servers, bf16",
            [0.75, 0, 0, 0.25],
        ),
    ],
)
def test_who_reduces_what(fields: dict[str, object], method: str, shares: list[float]) -> None:
    plan = plan_of(**fields)
    schedule = compile_plan(plan, WORKLOAD, CLUSTER)
    assert method_of(plan.groups[0]) == method
    assert reducers(schedule.messages[0], 4) == pytest.approx(shares, abs=1e-4)


def test_the_cluster_says_what_links_carry() -> None:
    """A server on the fat node takes in 3 x 4 MB, and every leaf sends and gets 4 MB, framing on top."""
    plan = plan_of(architecture="parameter_server", topology="star", placement=[0])
    prediction = Replay(WORKLOAD, CLUSTER, Constants.ideal()).predict(compile_plan(plan, WORKLOAD, CLUSTER))
    picture = cluster_picture(CLUSTER, Traffic(prediction.step_time, prediction.timeline.links))
    assert picture is not None
    svg = str(picture.svg)
    assert len(re.findall(r">12 MB, \d+% of 400 Mbit/s<", svg)) == 2
    assert len(re.findall(r">4 MB, \d+% of 100 Mbit/s<", svg)) == 6
    assert all(f">rank {rank}<" in svg for rank in range(4))


@pytest.mark.parametrize(
    "name", ["ring_of_four", "two_nodes_of_four", "two_sites_wan", "four_racks_of_two", "one_node"]
)
def test_clusters_of_every_shape_can_be_drawn(name: str) -> None:
    cluster = resolve_cluster(name)
    picture = cluster_picture(cluster, Traffic(0.1, {}))
    assert picture is not None
    svg = str(picture.svg)
    assert all(f">{node.name}<" in svg for node in cluster.nodes)


def test_clusters_too_large_or_unknown_are_left_out() -> None:
    assert cluster_picture(ClusterSpec.uniform(nodes=MOST_NODES + 1, bandwidth=1e9), Traffic(0.1, {})) is None
    assert cluster_picture(ClusterSpec.uniform(nodes=2), Traffic(0.1, {})) is None


def test_a_plan_over_several_interfaces_shows_the_share_of_each() -> None:
    cluster = two_interfaces([3e7] * 4, [1e7] * 4)
    plan = builders.packed_trees(WORKLOAD, cluster)
    schedule = compile_plan(plan, WORKLOAD, cluster)
    assert interface_shares(schedule.messages[0], 2) == pytest.approx([0.75, 0.25], abs=0.02)
    picture = plan_picture(plan, schedule, WORKLOAD)
    assert ">% over interface<" in str(picture.svg)
    assert "that on every network interface" in picture.description
    (row,) = message_rows(PlanView(plan, WORKLOAD, schedule, None))
    assert re.search(r"packed trees, by interface: 7\d% over 0, 2\d% over 1$", row["method"])
    links = cluster_picture(cluster, Traffic(0.1, {}))
    assert links is not None
    svg = str(links.svg)
    assert svg.count(">n3<") == 2  # on each network
    assert all(f">interface {number}<" in svg for number in range(2))


def test_a_plan_over_the_first_interface_shows_none() -> None:
    plan = plan_of(topology="native")
    picture = plan_picture(plan, compile_plan(plan, WORKLOAD, CLUSTER), WORKLOAD)
    assert "interface" not in str(picture.svg) + picture.description
    (row,) = message_rows(PlanView(plan, WORKLOAD, compile_plan(plan, WORKLOAD, CLUSTER), None))
    assert "interface" not in row["method"]


def test_interfaces_that_share_switches_are_one_graph() -> None:
    links = cluster_picture(two_interfaces([1e6] * 3, [1e6] * 3, trunk=1e6), Traffic(0.1, {}))
    assert links is not None
    assert ">interface 1<" not in str(links.svg)


def test_a_plan_with_many_messages_shows_the_largest() -> None:
    variables = tuple(Variable(name=f"v{number}", shape=(100 + number,)) for number in range(MOST_ROWS + 5))
    workload = Workload(name="many", variables=variables)
    plan = builders.all_reduce(workload, CLUSTER, chunk_size=1)
    svg = str(plan_picture(plan, compile_plan(plan, workload, CLUSTER), workload).svg)
    assert svg.count('id="messages-message-') == MOST_ROWS
    assert "<title>v0," not in svg
    assert f"<title>v{MOST_ROWS + 4}," in svg


def test_labels_keep_their_distance_and_their_order() -> None:
    assert spread([0.5, 0.1], 0.1) == [0.5, 0.1]
    assert spread([0.5, 0.52, 0.1], 0.1) == pytest.approx([0.5, 0.6, 0.1])
    assert spread([0.99, 1.0, 0.98], 0.1) == pytest.approx([0.9, 1.0, 0.8])


def test_colours_and_fonts_are_the_pages_and_marks_have_tooltips() -> None:
    with report_style():
        figure = new_figure(2.0)
        axes = figure.add_subplot()
        axes.scatter([1, 2], [1, 2], color=INK, gid="marks")
        axes.set_title("a < $b$")
    svg = str(Picture("pic", figure, "two & marks", {"marks": ["one", "<two>"]}).svg)
    assert svg.startswith("<svg")
    assert INK not in svg
    assert "var(--ink)" in svg
    assert "DejaVu" not in svg
    assert ">a &lt; $b$<" in svg
    assert "<title>one</title>" in svg
    assert "<title>&lt;two&gt;</title>" in svg
    assert 'aria-labelledby="pic-description"' in svg
    assert ">two &amp; marks</desc>" in svg
    with pytest.raises(ValueError, match="1 lines for 2 marks of 'marks'"):
        _ = Picture("pic", figure, "", {"marks": ["one"]}).svg


def test_the_same_figure_is_the_same_text() -> None:
    def drawn() -> str:
        with report_style():
            figure = new_figure(2.0)
            figure.add_subplot().bar([1, 2], [3, 4], hatch="//")
        return str(Picture("bars", figure, "").svg)

    assert drawn() == drawn()


def test_timelines_come_back_from_their_file(tmp_path: Path) -> None:
    timeline = Timeline(2.0, (MessageSpan("m", 0.5, 1.5, 0.4),), ((Span("forward", 0.0, 0.5),),), {"a > b": 0.5})
    save_timelines({"measured": timeline}, tmp_path / "timelines.json")
    assert load_timelines(tmp_path / "timelines.json") == {"measured": timeline}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "autosync-timelines/1"}', "timelines: Input should be a valid dictionary"),
        (
            '{"format": "autosync-timelines/1", "timelines": {"a": {"step_time": 1}}}',
            r"timelines: a\.messages: .*missing",
        ),
        ('{"format": "other/1"}', "format: 'other/1' cannot be read"),
        ("[]", "expected a mapping"),
    ],
)
def test_other_files_are_no_timelines(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "timelines.json").write_text(text)
    with pytest.raises(DocumentError, match=message):
        load_timelines(tmp_path / "timelines.json")


def test_origins_differ_by_colour_and_by_marker() -> None:
    found = origin_looks(["baseline", "startup", "evolved", "tpe", "gp", "evolved"])
    assert list(found) == ["baseline", "startup", "evolved", "tpe", "gp"]
    colors, markers = zip(*found.values(), strict=True)
    assert len(set(colors)) == len(set(markers)) == len(found)
    assert origin_looks(["evolved", "baseline"])["baseline"] == found["baseline"]
