"""``autosync predict``: what it takes, what it leaves, and what it says about wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_autosync.cli.predict import predict
from lightning_autosync.cluster import LinkGraph, configuration_directory, resolve_cluster
from lightning_autosync.documents import read_data
from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.plan import builders
from lightning_autosync.replay import Constants
from lightning_autosync.workload import catalogue

MODULE = {"kind": "perceptron", "widths": [8, 8, 8], "batch": 2}
ASKED: dict[str, Any] = {"plan": "byteps", "workload": "ncf", "cluster": "fat_node_star"}


def test_names_and_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict({**ASKED, "arguments": {"topology": "tree"}, "model": {"batch_size": 32}}, tmp_path / "names")
    workload, cluster = catalogue.build("ncf", batch_size=32), resolve_cluster("fat_node_star")
    documents = {
        "workload": workload,
        "cluster": cluster,
        "plan": builders.byteps(workload, cluster, topology="tree"),
        "constants": Constants(),
    }
    files = {name: str(tmp_path / f"{name}.yaml") for name in documents}
    for name, document in documents.items():
        document.save(files[name])
    predict(files, tmp_path / "files")
    by_name, by_file = (json.loads((tmp_path / run / "result.json").read_text()) for run in ("names", "files"))
    assert by_name["step_time"] == pytest.approx(by_file["step_time"])
    assert 0 < by_name["bound_share"] <= 1
    assert {path.name for path in (tmp_path / "names").iterdir()} == {
        "result.json",
        "timeline.svg",
        "timeline.png",
        "trace.json",
    }
    assert "critical path" in capsys.readouterr().out


def test_the_prices_prove_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict({**ASKED, "cluster": "two_racks_8to1"}, tmp_path)
    links = LinkGraph(resolve_cluster("two_racks_8to1")).channels
    bandwidths = {channel.name: channel.bandwidth or 0.0 for channel in links}
    result = json.loads((tmp_path / "result.json").read_text())
    prices = result["prices"]
    assert prices.keys() == result["binding"].keys()
    rate = sum(price * bandwidths[name] for name, price in prices.items())
    for name, share in result["binding"].items():
        assert share == pytest.approx(prices[name] * bandwidths[name] / rate)
    text = capsys.readouterr().out
    name, price = next(iter(prices.items()))
    assert f"  {name} ({result['binding'][name]:.0%}), {price:.4g}\n" in text
    assert f"prices x bandwidths: {rate / 1e6:.4g} MB/s; sums form along trees of ranks to roots" in text


def test_settings_of_ddp_that_the_command_fills_in_are_not_refused(tmp_path: Path) -> None:
    filled = read_data(configuration_directory() / "ddp" / "sweep.yaml", DocumentError)
    predict({**ASKED, "ddp": filled}, tmp_path)
    assert (tmp_path / "result.json").exists()


def test_a_plan_for_another_model_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    cluster = resolve_cluster("fat_node_star")
    builders.byteps(catalogue.build("vgg16"), cluster).save(path)
    with pytest.raises(AutoSyncError, match=rf"^{re.escape(path)}: groups"):
        predict({**ASKED, "plan": path}, tmp_path)


ONE_RANK = {
    "format": "autosync-cluster/1",
    "name": "one",
    "uniform": {"nodes": 1, "devices": 1, "bandwidth": "1 Gbit/s"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "bytps"}, "'bytps' is neither a file .* nor a builder"),
        ({"plan": "missing.yaml"}, "missing.yaml: cannot be read"),
        ({"plan": "plans/missing"}, "plans/missing: cannot be read"),
        (
            {"arguments": {"sharding": 1}},
            "builder 'byteps' has no argument 'sharding'; allowed: topology",
        ),
        (
            {"arguments": {"topology": "mesh"}},
            "builder 'byteps': topology: .*'mesh' is not known; .*star",
        ),
        ({"workload": "alexnet"}, "no model 'alexnet' in the catalogue"),
        ({"workload": "w.yaml", "model": {"batch_size": 1}}, "model: workload 'w.yaml' is a file"),
        ({"cluster": "moon"}, "no shipped cluster is named 'moon'"),
        ({"cluster": ONE_RANK}, "cluster: 'one' has one rank, so nothing is synchronized; give two or more"),
        ({"links": 3}, "links: unknown field"),
        ({"rates": "nowhere.yaml"}, "rates: only for a plan that splits operators"),
        ({"module": MODULE}, "module: only for a plan that splits operators"),
        ({"search_seconds": 7}, "search_seconds: only without plan="),
        ({"ddp": {"bucket_cap_mb": [5]}}, "ddp: only without plan=; leave ddp out"),
    ],
)
def test_wrong_input_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoSyncError, match=message):
        predict({**ASKED, **change}, tmp_path)


@pytest.mark.parametrize(
    "ignored",
    [
        {"workload": "ncf"},
        {"model": {"batch_size": 1}},
        {"arguments": {"topology": "ring"}},
        {"constants": "c.yaml"},
        {"batch_size": 4},
        {"micro_batch": 4},
        {"search_seconds": 7},
        {"ddp": {"bucket_cap_mb": [5]}},
    ],
)
def test_what_a_plan_that_splits_operators_ignores_is_refused(tmp_path: Path, ignored: dict[str, Any]) -> None:
    path = tmp_path / "split.yaml"
    path.write_text(f"format: {HybridPlan.FORMAT}\nmesh: [2]\n")
    (name,) = ignored
    with pytest.raises(AutoSyncError, match=f"^{name}: not for a plan that splits operators; leave {name} out"):
        predict({"plan": str(path), "cluster": "fat_node_star", **ignored}, tmp_path)
