from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cluster_strategies import random_clusters
from hypothesis import given
from schemas import check_schema
from sweeps import examples

from lightning_autosync.cluster import (
    ClusterSpec,
    configuration_directory,
    files,
    resolve_cluster,
    shipped_clusters,
    synchronization_rate,
)
from lightning_autosync.errors import ClusterError

HEAD = {"format": "autosync-cluster/1", "name": "c"}
PAIR: dict[str, Any] = {
    **HEAD,
    "nodes": [{"name": "a"}, {"name": "b"}],
    "links": [{"a": "a", "b": "b", "bandwidth": "1 Gbit/s"}],
}


def link(a: str, b: str, **fields: Any) -> dict[str, Any]:
    return {"a": a, "b": b, "bandwidth": 1e8, **fields}


MALFORMED: list[tuple[Any, str]] = [
    (["nodes"], "expected a mapping of fields, got list"),
    ({"name": "c", "nodes": [{"name": "a"}]}, "format: missing; expected 'autosync-cluster/1'"),
    ({**PAIR, "format": "autosync-cluster/2"}, "written by a newer release"),
    ({**PAIR, "format": "autosync-plan/1"}, "'autosync-plan/1' cannot be read"),
    ({key: PAIR[key] for key in ("format", "nodes", "links")}, "name: missing"),
    (HEAD, "nodes: missing"),
    ({**HEAD, "nodes": []}, "nodes: List should have at least 1 item"),
    ({**PAIR, "racs": 2}, "racs: unknown field; did you mean 'racks'?"),
    ({**HEAD, "stars": ["1 Gbit/s"]}, "stars: unknown field; did you mean 'star'? (and 'nodes' is missing)"),
    ({**HEAD, "nodes": [{"name": "a", "gpus": 2}]}, "nodes[0].gpus: unknown field; allowed: name, address, "),
    ({**HEAD, "nodes": [{"name": "a b"}]}, "nodes[0].name: String should match"),
    ({**HEAD, "nodes": [{"name": "a", "devices": 0}]}, "nodes[0].devices: Input should be greater than 0"),
    (
        {**HEAD, "nodes": [{"name": "a", "speed": 0}]},
        "nodes[0].speed: Input should be greater than or equal to 0.000001",
    ),
    ({**HEAD, "nodes": [{"name": "a", "memory": "16 Gib"}]}, "nodes[0].memory: unknown unit 'Gib'"),
    ({**HEAD, "nodes": [{"name": "a"}, {"name": "a"}]}, "nodes[1].name: 'a' is taken"),
    ({**PAIR, "switches": ["b"]}, "switches[0]: 'b' is taken"),
    ({**PAIR, "links": [link("a", "x")]}, "links[0].b: 'x' is neither a node nor a switch"),
    ({**PAIR, "links": [link("a", "a")]}, "links[0]: b: a link needs two different ends, both are 'a'"),
    ({**PAIR, "links": [link("a", "b"), link("b", "a")]}, "links[1]: 'b' and 'a' are linked already"),
    ({**PAIR, "links": [link("a", "b", bandwidth=0)]}, "links[0].bandwidth: must be more than zero (got 0)"),
    ({**PAIR, "links": [link("a", "b", latency="-1 us")]}, "links[0].latency: must be zero or more"),
    ({**PAIR, "links": [link("a", "b", bandwidth=-1)]}, "bandwidth: must be more than zero (got -1) (line"),
    (
        {**PAIR, "links": [link("a", "b", bandwidth=None, reverse_bandwidth=1)]},
        "links[0]: bandwidth: missing although reverse_bandwidth is given",
    ),
    (
        {**PAIR, "switches": ["s"], "links": [link("a", "s"), link("b", "s", bandwidth=None)]},
        "links[1].bandwidth: missing although other links have one",
    ),
    ({**PAIR, "links": []}, "links: no path from 'a' to 'b'"),
    ({**PAIR, "switches": ["s"]}, "links: no path from 'a' to 's'"),
    ({**PAIR, "local_bandwidth": "fast"}, "local_bandwidth: expected a number or a rate"),
    ({**PAIR, "rank_order": ["a"]}, "rank_order: 'b' occurs 0 times, expected 1"),
    ({**PAIR, "rank_order": ["a", "b", "b"]}, "rank_order: 'b' occurs 2 times, expected 1"),
    ({**PAIR, "rank_order": ["a", "x"]}, "rank_order[1]: 'x' is not a node; allowed: a, b"),
    ({**PAIR, "uniform": {"nodes": 2}}, "uniform and nodes and links: give one short form, or nodes"),
    ({**HEAD, "uniform": {"nodes": 2}, "star": {"bandwidths": [1]}}, "uniform and star: give one short form"),
    ({**HEAD, "uniform": 4}, "uniform: expected a mapping of fields, got int"),
    ({**HEAD, "uniform": {"nodes": True}}, "uniform.nodes: Input should be a valid integer (got True)"),
    ({**HEAD, "uniform": {"nodes": 0}}, "uniform.nodes: Input should be greater than 0"),
    ({**HEAD, "uniform": {"nodes": 2, "rate": 1}}, "uniform.rate: unknown field; allowed: devices, latency, "),
    ({**HEAD, "star": {"bandwidths": []}}, "star.bandwidths: List should have at least 1 item"),
    ({**HEAD, "star": {"bandwidths": [1, "2 Gbits"]}}, "star.bandwidths[1]: unknown unit 'Gbits'"),
    (
        {**HEAD, "racks": {"racks": 2, "nodes_per_rack": 2, "uplink": 1}},
        "racks.bandwidth and uplink: state both",
    ),
]


@pytest.mark.parametrize(("data", "message"), MALFORMED, ids=[message[:40] for _, message in MALFORMED])
def test_malformed_clusters_name_file_and_field(data: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        ClusterSpec.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_clusters_load_round_trip_and_meet_their_schema(name: str, tmp_path: Path) -> None:
    spec = resolve_cluster(name)
    assert spec.name == name
    assert spec.measured
    for suffix in ("yaml", "json"):
        path = tmp_path / f"copy.{suffix}"
        spec.save(path)
        assert ClusterSpec.load(path) == spec == resolve_cluster(path) == resolve_cluster(str(path))
        assert ClusterSpec.load(path).fingerprint == spec.fingerprint
    check_schema(ClusterSpec, yaml.safe_load(shipped_clusters()[name].read_text()))
    check_schema(ClusterSpec, spec.to_dict())


@pytest.mark.parametrize(
    ("short_form", "told"),
    [
        (
            {"star": {"bandwidths": [400, "100", "100 B/s"]}},
            "star.bandwidths[0]: 400 is 400 bytes/s (and 1 more); write '400 Mbit/s', or '400 B/s' if that is meant",
        ),
        (
            {"uniform": {"nodes": 2, "bandwidth": 99999.5}},
            "uniform.bandwidth: 99999.5 is 99999.5 bytes/s; write '99999.5 Mbit/s', or '99999.5 B/s' if that is meant",
        ),
        (
            {"uniform": {"nodes": 2, "bandwidth": 125000, "latency": 50}},
            "uniform.latency: 50 is 50 seconds; write '50 us', or '50 s' if that is meant",
        ),
        ({"uniform": {"nodes": 2, "bandwidth": 125000, "latency": 0.99}}, None),
        ({"uniform": {"nodes": 2, "bandwidth": 125000, "latency": "50 s"}}, None),
        ({"racks": {"racks": 1, "nodes_per_rack": 2, "bandwidth": "1 B/s", "uplink": "1e9"}}, None),
        ({"uniform": {"nodes": 2, "bandwidth": None}}, None),
    ],
)
def test_a_number_without_a_unit_that_is_probably_wrong_is_told_once(
    short_form: dict[str, Any], told: str | None, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({**HEAD, **short_form}))
    resolve_cluster(path)
    assert [str(warning.message) for warning in recwarn] == ([f"{path}: {told}"] if told else [])


def test_a_slow_rate_without_a_unit_is_told_where_code_gives_it() -> None:
    with pytest.warns(
        UserWarning, match=r"^ClusterSpec: star\.bandwidths\[0\]: 400 is 400 bytes/s; write '400 Mbit/s'"
    ):
        ClusterSpec.star([400, "100 Mbit/s"])


BEYOND: tuple[dict[str, Any], ...] = (
    {"nodes": 10_000_000},
    {"devices": 10_000_000},
    {"latency": 1e300},
    {"bandwidth": 1e300},
    {"bandwidth": 10**320},
)
"""Fields of a short form that are beyond a limit."""


def test_the_schema_refuses_what_loading_refuses() -> None:
    for data in (
        {**HEAD},
        {**HEAD, "uniform": {"nodes": 2, "rate": 1}},
        {**PAIR, "star": {"bandwidths": [1]}},
        *({**HEAD, "uniform": {"nodes": 2, "bandwidth": 1, **field}} for field in BEYOND),
        {**PAIR, "nodes": [{"name": "a", "devices": 10**6}, {"name": "b"}]},
        {**PAIR, "links": [link("a", "b", latency=1e300)]},
        {**HEAD, "nodes": [{"name": f"n{number}"} for number in range(5000)], "links": []},
    ):
        with pytest.raises(ClusterError):
            ClusterSpec.from_dict(data)
        with pytest.raises(jsonschema.ValidationError):
            check_schema(ClusterSpec, data)


@given(random_clusters())
@examples(50)
def test_documents_round_trip(spec: ClusterSpec) -> None:
    assert ClusterSpec.from_dict(spec.to_dict()) == spec
    assert ClusterSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec


def test_every_cluster_asked_for_is_shipped() -> None:
    assert set(shipped_clusters()) >= {
        "one_node", "four_equal", "fat_node_star", "fat_node_star_8", "two_racks_2to1", "two_racks_8to1",
        "four_racks_of_four", "ring_of_four", "two_sites_wan", "two_nodes_of_four", "autosync_a",
        "autosync_b",
    }  # fmt: skip


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ClusterError, match=r"no shipped cluster is named 'nowhere'; allowed: autosync_a, .*two_"):
        resolve_cluster("nowhere")
    with pytest.raises(ClusterError, match="expected a ClusterSpec, a path or a name, got NoneType"):
        resolve_cluster(None)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match=r"here\.yaml: cannot be read"):
        resolve_cluster("not/here.yaml")


def test_clusters_are_found_inside_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lightning_autosync"
    shutil.copytree(configuration_directory(), package / "conf")
    monkeypatch.setattr(files, "__file__", str(package / "cluster" / "shipped.py"))
    assert configuration_directory() == package / "conf"
    assert resolve_cluster("four_equal").world_size == 4
    shutil.rmtree(package / "conf")
    with pytest.raises(ClusterError, match="the installation is incomplete"):
        configuration_directory()


def test_a_specification_resolves_to_itself() -> None:
    spec = ClusterSpec.uniform(2)
    assert resolve_cluster(spec) is spec


@pytest.mark.parametrize(
    ("bandwidths", "told"),
    [("400 Mbit/s", r"Input should be a valid list \(got '400 Mbit/s'\)"), ([], "List should have at least 1 item")],
)
def test_a_star_needs_a_list_of_rates(bandwidths: list[float] | str, told: str) -> None:
    with pytest.raises(ClusterError, match=f"ClusterSpec: star.bandwidths: {told}"):
        ClusterSpec.star(bandwidths)


def test_short_forms_equal_what_they_stand_for() -> None:
    yaml_form = {**HEAD, "name": "star", "star": {"bandwidths": ["8 Mbit/s", 2e6], "latency": "1 us"}}
    written_out = {
        **HEAD,
        "name": "star",
        "nodes": [{"name": "node0"}, {"name": "node1"}],
        "switches": ["switch"],
        "links": [
            {"a": "node0", "b": "switch", "bandwidth": 1e6, "latency": 1e-6},
            {"a": "node1", "b": "switch", "bandwidth": 2e6, "latency": 1e-6},
        ],
    }
    constructed = ClusterSpec.star(["8 Mbit/s", 2e6], latency="1 us")
    assert ClusterSpec.from_dict(yaml_form) == ClusterSpec.from_dict(written_out) == constructed


def test_racks_have_an_uplink_each() -> None:
    spec = ClusterSpec.racks(2, 2, bandwidth=4e6, uplink=1e6)
    assert spec.switches == ("rack0", "rack1", "core")
    assert [(link.a, link.b, link.bandwidth) for link in spec.links if link.b == "core"] == [
        ("rack0", "core", 1e6),
        ("rack1", "core", 1e6),
    ]
    assert ClusterSpec.racks(1, 3, bandwidth=1, uplink=1).switches == ("rack0",)


def test_one_node_has_no_network() -> None:
    spec = ClusterSpec.uniform(1, devices=4)
    assert (spec.links, spec.switches, spec.measured, spec.world_size) == ((), (), True, 4)


def test_a_shape_alone_is_not_measured() -> None:
    spec = ClusterSpec.uniform(nodes=2, devices=4)
    assert not spec.measured
    assert spec.localities() == ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(ClusterError, match=r"cluster 'uniform': links\[0\].bandwidth: unknown"):
        synchronization_rate(spec)


def test_wrong_arguments_of_constructors_raise_the_same_errors() -> None:
    with pytest.raises(ClusterError, match=r"uniform\.nodes: Input should be greater than 0"):
        ClusterSpec.uniform(0)
    with pytest.raises(ClusterError, match="rank_order: 'node1' occurs 0 times"):
        ClusterSpec.uniform(2).with_rank_order(["node0"])
    with pytest.raises(ClusterError, match=r"links\[0\].bandwidth: must be more than zero"):
        ClusterSpec.star([1, 2]).scaled(0)


def test_ranks_follow_the_rank_order() -> None:
    spec = ClusterSpec.uniform(2, devices=2)
    assert spec.rank_nodes == (0, 0, 1, 1)
    mixed = spec.with_rank_order(["node1", "node0", "node1", "node0"])
    assert mixed.rank_nodes == (1, 0, 1, 0)
    assert mixed.ranks_of(0) == (1, 3)
    assert mixed.localities() == ((0, 2), (1, 3))
    assert mixed.with_rank_order(None) == spec


def test_localities_are_nodes_then_racks_then_everything() -> None:
    racks = ClusterSpec.racks(2, 2, bandwidth=1, uplink=1)
    assert racks.localities() == ((0, 1), (2, 3))
    deep = ClusterSpec.racks(2, 2, bandwidth=1, uplink=1, devices=2)
    assert deep.localities() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert deep.hierarchy()[1] == ((0, 1, 2, 3), (4, 5, 6, 7))
    everything = ((0, 1, 2, 3),)
    assert ClusterSpec.uniform(4).localities() == everything
    assert ClusterSpec.uniform(1, devices=4).localities() == everything
    assert resolve_cluster("ring_of_four").localities() == everything


@pytest.mark.parametrize("look_up", ["localities", "hierarchy", "rank_nodes", "ranks_of"])
def test_look_ups_take_work_in_proportion_to_the_nodes(look_up: str) -> None:
    """Lines that are run: a clock would count other processes, too."""

    def lines(nodes: int) -> int:
        spec = ClusterSpec.racks(nodes // 16, 16)
        calls: dict[str, Callable[[], object]] = {
            "localities": spec.localities,
            "hierarchy": spec.hierarchy,
            "rank_nodes": lambda: spec.rank_nodes,
            "ranks_of": lambda: [spec.ranks_of(node) for node in range(nodes)],
        }
        count = 0

        def tracer(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            calls[look_up]()
        finally:
            sys.settrace(before)
        return count

    assert lines(1024) < 5 * lines(256)


def test_scaling_multiplies_rates_and_leaves_the_rest() -> None:
    spec = ClusterSpec.from_dict({**PAIR, "links": [link("a", "b", reverse_bandwidth=2e8, latency=1e-3)]})
    scaled = spec.scaled(0.5)
    assert scaled.links[0].model_dump() == {
        "a": "a", "b": "b", "bandwidth": 5e7, "reverse_bandwidth": 1e8, "latency": 1e-3
    }  # fmt: skip
    assert scaled.local_bandwidth == spec.local_bandwidth / 2
    assert scaled.scaled(2) == spec
    assert ClusterSpec.uniform(2).scaled(3).links == ClusterSpec.uniform(2).links


def test_emulation_keeps_the_rates_of_links_and_has_the_speed_of_this_machine_inside_a_node() -> None:
    spec = ClusterSpec.from_dict({**PAIR, "links": [link("a", "b", latency=1e-3)], "local_latency": 1e-3})
    emulated = spec.scaled(0.01).as_emulated()
    assert emulated.links[0].bandwidth == spec.links[0].bandwidth / 100
    assert emulated.links[0].latency == emulated.local_latency == 0
    assert emulated.local_bandwidth == spec.local_bandwidth


def test_emulation_keeps_the_latencies_that_noise_does_not_hide() -> None:
    assert ClusterSpec.uniform(2, bandwidth=1e6, latency="1 ms").as_emulated().links[0].latency == 0
    wan = ClusterSpec.uniform(2, bandwidth=1e6, latency="20 ms")
    assert wan.as_emulated() == wan


def test_a_link_is_the_same_both_ways_unless_told() -> None:
    assert ClusterSpec.from_dict(PAIR).links[0].reverse_bandwidth == 1.25e8
    assert "reverse_bandwidth" not in ClusterSpec.from_dict(PAIR).to_dict()["links"][0]


@pytest.mark.parametrize("address", ["-oProxyCommand=touch x", "10.0.0.1 -v", ""])
def test_an_address_is_one_word_and_no_option(address: str) -> None:
    with pytest.raises(ClusterError, match=r"nodes\[0\].address: "):
        ClusterSpec.from_dict(
            {"format": "autosync-cluster/1", "name": "one", "nodes": [{"name": "a", "address": address}]}
        )
