"""``autosync predict`` without a plan: what a job would gain over DDP."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_autosync.cli.predict import predict
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import AutoSyncError
from lightning_autosync.measure.bench.settings import DDPSweep
from lightning_autosync.plan import builders
from lightning_autosync.replay import Constants
from lightning_autosync.report.gain import GainResult, GainRow, gain_remarks, gain_table
from lightning_autosync.strategy.gain import choose_without_trials, predict_gain
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.star([100e6, 25e6, 25e6, 25e6])
SLOW_NODE = CLUSTER.model_copy(
    update={"nodes": tuple(node.model_copy(update={"speed": 1.0 + place}) for place, node in enumerate(CLUSTER.nodes))}
)
LAYERS = tuple(Variable(name=f"layer{number}", shape=(500, 500), ready=0.02 * (5 - number) / 5) for number in range(5))
WORKLOAD = Workload(name="layers", variables=LAYERS, forward_time=0.01, backward_time=0.02)
TABLE = Variable(name="table", shape=(10_000, 50), kind="row_sparse", rows=100.0)
SHORT = TuningSettings(search=0.1)
CAPS = DDPSweep(bucket_cap_mb=("default", 1, 100))


def gain(workload: Workload = WORKLOAD, cluster: ClusterSpec = CLUSTER) -> GainResult:
    return predict_gain(workload, cluster, Constants(), CAPS, SHORT)


@pytest.fixture(scope="module")
def result() -> GainResult:
    return gain()


def text_of(result: GainResult, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(gain_table(result))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_every_speedup_is_over_the_best_ddp_and_none_beats_the_bound(result: GainResult) -> None:
    ddp, (bound,), (choice,) = result.of("ddp"), result.of("bound"), result.of("choice")
    assert ddp[0].step_time == min(row.step_time for row in ddp)
    assert ddp[0].speedup == 1
    assert all(row.speedup == pytest.approx(ddp[0].step_time / row.step_time) for row in result.rows)
    assert choice.speedup > 1.1  # links differ, and bandwidth-proportional shards use them
    assert all(row.speedup <= bound.speedup for row in (*ddp, choice, *result.of("builder")))
    assert {row.name for row in result.of("builder")} | result.left_out.keys() == set(builders.names())
    assert len(result.of("overlap")) == 1
    assert result.of("overlap")[0].step_time < choice.step_time


def test_batch_shares_have_a_row_where_nodes_have_different_speeds(result: GainResult) -> None:
    assert result.of("shares") == result.of("shares_overlap") == []
    unequal = gain(cluster=SLOW_NODE)
    (shares,), (choice,) = unequal.of("shares"), unequal.of("choice")
    assert shares.step_time < choice.step_time
    (both,), (overlap,) = unequal.of("shares_overlap"), unequal.of("overlap")
    assert both.step_time < min(shares.step_time, overlap.step_time)
    assert both.topologies == overlap.topologies
    assert both.name == 'AutoSync, batch_shares="auto", overlap="step"'
    assert "speedup with shares and overlap" in unequal.figures()


def test_micro_batches_have_a_row_that_says_what_was_assumed() -> None:
    found = predict_gain(WORKLOAD, SLOW_NODE, Constants(), CAPS, SHORT, micro_batches=(32, 16))
    (row,), (shares,) = found.of("micro_batches"), found.of("shares")
    assert row.step_time > shares.step_time  # shares of 0.8 to 3.2 micro-batches are rounded
    assert row.name.startswith('AutoSync, batch_shares="auto", micro_batch=16 (1 to 3 of 8 for each rank, ')
    assert any(line.startswith("micro-batches: ") for line in gain_remarks(found))
    assert "speedup with micro-batches" in found.figures()


def test_overlap_is_predicted_for_the_plan_that_a_job_with_overlap_chooses() -> None:
    layers = tuple(
        Variable(name=f"layer{number}", shape=(1000, 1000), ready=0.005 * (20 - number)) for number in range(20)
    )
    workload = Workload(name="layers", variables=layers, forward_time=0.05, backward_time=0.1)
    equal = ClusterSpec.uniform(4, bandwidth=1e9)
    found = predict_gain(workload, equal, Constants(), CAPS, TuningSettings(search=2.0))
    (choice,), (overlap,) = found.of("choice"), found.of("overlap")
    assert choice.topologies == ("native",)
    assert "native" not in overlap.topologies
    assert overlap.speedup > 1.05 > choice.speedup


def test_overlap_has_no_row_where_it_has_no_effect() -> None:
    found = gain(cluster=ClusterSpec.uniform(1, devices=4, bandwidth="1 Gbit/s"))
    assert found.of("choice")[0].topologies == ("shared_memory",)
    assert found.of("overlap") == []
    assert not any(line.startswith("overlap") for line in gain_remarks(found))


def test_the_choice_is_that_of_a_job_which_knows_no_times_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Workload] = []

    def searched(workload: Workload, *rest: Any, **options: Any) -> list[Alternative]:
        asked.append(workload)
        names = {"byteps": 0.9, "all_reduce": 1.0}
        return [
            Alternative(builders.build(name, workload, CLUSTER), name, names[name], native=name == "all_reduce")
            for name in names
        ]

    monkeypatch.setattr("lightning_autosync.strategy.gain.search_plans", searched)
    whole = Workload(name="layers", variables=(*LAYERS, TABLE), forward_time=0.01, backward_time=0.02)
    plan, reason = choose_without_trials(whole, CLUSTER, Constants(), SHORT)
    assert plan == builders.byteps(asked[0], CLUSTER)
    assert reason.startswith("byteps, predicted for cluster 'star'")
    variables = [
        *(layer.model_copy(update={"ready": None}) for layer in LAYERS),
        TABLE.model_copy(update={"rows": None}),
    ]
    assert asked == [Workload(name="layers", variables=tuple(variables))]


def test_the_choice_on_one_host_needs_no_search() -> None:
    alone = ClusterSpec.uniform(nodes=1, devices=2)
    plan, reason = choose_without_trials(WORKLOAD, alone, Constants(), SHORT)
    assert {group.topology for group in plan.groups} == {"shared_memory"}
    assert "shared memory" in reason


def test_ddp_sends_whole_tables() -> None:
    result = gain(Workload(name="tables", variables=(*LAYERS, TABLE), forward_time=0.01, backward_time=0.02))
    whole = sum(layer.bytes for layer in LAYERS) + TABLE.bytes
    ddp, (choice,) = result.of("ddp"), result.of("choice")
    assert ddp[0].sent == pytest.approx(1.5 * whole, rel=1e-3)  # a ring of four ranks
    assert choice.sent is None
    assert any(line.startswith("rows: ") for line in gain_remarks(result))


def test_the_table_fits_80_columns_and_times_are_in_the_unit_that_fits(result: GainResult) -> None:
    rows = (
        GainRow(kind="ddp", name="DDP, 100 MiB buckets", step_time=1.25, speedup=1.0, sent=8e8, messages=5),
        GainRow(kind="ddp", name="DDP, default buckets", step_time=1.5, speedup=0.83, sent=8e8, messages=23),
        GainRow(kind="choice", name="AutoSync", step_time=0.5, speedup=2.5, sent=8e8, messages=9, topologies=("star",)),
        GainRow(
            kind="builder", name="random_axis_partitioned_all_reduce", step_time=1.3, speedup=0.96, sent=8e8,
            messages=161, topologies=("native", "packed"),
        ),
        GainRow(kind="bound", name="bound without overlap", step_time=0.4, speedup=3.125),
    )  # fmt: skip
    found = result.model_copy(update={"rows": rows})
    lines = text_of(found).splitlines()
    assert max(map(len, lines)) <= 80
    (best,) = (line for line in lines if "DDP" in line and "1.250 s" in line)
    assert "best of 2" in " ".join(lines)
    assert "1.00x" in best
    (choice,) = (line for line in lines if "AutoSync" in line)
    assert "500.0 ms" in choice
    assert "2.50x" in choice
    assert "9 star" in choice
    assert not any("1.500 s" in line for line in lines)
    first_column = "".join(re.split("[│|]", line)[1].strip() for line in lines if re.search("[│|]", line))
    assert "random_axis_partitioned_all_reduce" in first_column


def test_the_verb_prints_the_table_and_leaves_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    WORKLOAD.save(tmp_path / "workload.yaml")
    asked = {"workload": str(tmp_path / "workload.yaml"), "cluster": CLUSTER.to_dict(), "search_seconds": 0.1}
    predict({**asked, "ddp": {}}, tmp_path)
    said = capsys.readouterr().out
    assert "AutoSync: the plan by which a job begins, without trials: " in said
    assert "synchronization alone, without computation, takes " in said
    assert "the table compares whole steps" in said
    assert str(tmp_path / "result.json") in said
    result = GainResult.read(tmp_path)
    assert [row.name for row in result.of("ddp")] == ["DDP, default buckets"]
    assert all(row.name in said for row in result.rows)
    assert result.figures().keys() == {"best DDP", "speedup", "speedup with overlap", "speedup at bound"}


def test_a_model_of_the_bench_can_be_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"kind": "flat", "mib": 1.0}
    predict({"model": model, "cluster": CLUSTER.to_dict(), "search_seconds": 0.1}, tmp_path)
    result = GainResult.read(tmp_path)
    assert (result.workload, result.bytes, result.computes) == ("flat", 2**20, False)
    said = capsys.readouterr().out
    assert "these are times of synchronization" in said
    assert "the table compares whole steps" not in said


def test_a_bound_of_nothing_has_no_row() -> None:
    workload = Workload(name="small", variables=(Variable(name="fc", shape=(1024,)),))
    found = predict_gain(workload, CLUSTER, Constants(burst=131072), CAPS, SHORT)
    assert found.of("bound") == []
    assert "bound" not in text_of(found) + " ".join(gain_remarks(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": {"topology": "tree"}}, "arguments: only for one plan, with plan="),
        ({"rates": "rates.yaml"}, "rates: only for one plan"),
        ({"cluster": {"uniform": {"nodes": 1}}}, "cluster: 'one' has one rank"),
        ({"cluster": {"uniform": {"nodes": 2}}}, "cluster 'one': .*bandwidth: unknown"),
        ({"model": {"kind": "flat", "mib": 1.0}}, "workload: model=NAME has its own workload"),
        ({"workload": None, "model": {"kind": "flat", "size": 1.0}}, "model: .*size"),
        ({"search_seconds": 0.01}, "search_seconds: .*0.1"),
        ({"micro_batch": 16}, "batch_size: missing; give batch_size and micro_batch together"),
    ],
)
def test_wrong_input_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    asked = {"workload": "ncf", "cluster": CLUSTER.to_dict(), **change}
    if "cluster" in change:
        asked["cluster"] = {"format": "autosync-cluster/1", "name": "one", **change["cluster"]}
    with pytest.raises(AutoSyncError, match=message):
        predict(asked, tmp_path)
