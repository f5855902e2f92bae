"""Sizes and suggestions as text for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.documents import Record, bytes_text, checked, did_you_mean, unknown_name
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.registry import check_kind
from lightning_autosync.plan import Compressor, builders, codecs, topologies
from lightning_autosync.workload import Variable, Workload, catalogue

STAR = {
    "format": "autosync-cluster/1",
    "name": "star",
    "nodes": [{"name": "node1"}],
    "switches": ["switch"],
    "links": [{"a": "node1", "b": "switch"}],
}
WORKLOAD = Workload(name="one", variables=(Variable(name="p", shape=(8,)),))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (412, "412 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (25_960, "26 kB"),
        (8_294_400, "8.29 MB"),
        (999_600_000, "1 GB"),
        (12.5e9, "12.5 GB"),
        (4e12, "4 TB"),
        (5.5e16, "55000 TB"),
    ],
)
def test_the_unit_of_a_size_is_the_one_that_fits(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_the_nearest_names_are_suggested() -> None:
    known = ["two_racks_2to1", "two_racks_8to1", "ring"]
    assert did_you_mean("two_racks_8", known) == "did you mean 'two_racks_8to1'?"
    both = "did you mean two_racks_8to1=... or two_racks_2to1=...?"
    assert did_you_mean("two_racks_8", known, "{}=...".format, most=3) == both
    assert did_you_mean("mesh", known) == ""
    assert did_you_mean("RING", ["Ring"]) == "did you mean 'Ring'?"


def test_an_unknown_name_is_told_with_the_nearest_one_and_all_others() -> None:
    assert unknown_name("prob", ["probe", "search"]) == "not known; did you mean 'probe'? allowed: probe, search"
    assert unknown_name("x", ["probe", "search"]) == "not known; allowed: probe, search"
    assert unknown_name(3, []) == "not known; allowed: none"
    assert len(unknown_name("node", [f"node{number}" for number in range(16384)])) < 1100


class Choices(Record):
    how: Literal["list", "show"] = "list"
    count: Literal[1, 2] = 1


def test_a_wrong_choice_among_names_is_told_as_other_names_are() -> None:
    with pytest.raises(DocumentError, match=r"^x: how: 'lst' is not known; did you mean 'list'\? allowed: list, show$"):
        checked(Choices, {"how": "lst"}, "x")
    with pytest.raises(DocumentError, match=r"^x: count: Input should be 1 or 2 \(got 'list'\)$"):
        checked(Choices, {"count": "list"}, "x")


@pytest.mark.parametrize(
    ("raises", "near"),
    [
        (lambda: topologies.find("rings"), "ring"),
        (lambda: topologies.method("packd"), "packed"),
        (lambda: codecs.find("fp61"), "fp16"),
        (lambda: Compressor(kind="int88"), "int8"),
        (lambda: builders.find("packed_tree"), "packed_trees"),
        (lambda: builders.build("ps", WORKLOAD, ClusterSpec.uniform(2), servr=1), "server"),
        (lambda: resolve_cluster("four_equl"), "four_equal"),
        (lambda: catalogue.build("vgg17"), "vgg16"),
        (lambda: catalogue.build("vgg16", batchsize=2), "batch_size"),
        (lambda: check_kind("heterro"), "hetero"),
        (lambda: ClusterSpec.from_dict({**STAR, "links": [{"a": "node1", "b": "swich"}]}), "switch"),
        (lambda: ClusterSpec.from_dict({**STAR, "rank_order": ["node2"]}), "node1"),
        (lambda: AutoSyncStrategy(semantics="compresed"), "compressed"),
        (lambda: AutoSyncStrategy(tuning="of"), "off"),
    ],
)
def test_an_error_of_a_name_suggests_the_nearest_one(raises: Callable[[], object], near: str) -> None:
    with pytest.raises(ValueError, match=rf"did you mean '{near}'( or '\w+')*\? allowed: .*{near}"):
        raises()
