"""Runs that may split operators: what they measure under a limit of memory, and which plans can win."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from priced_session import PricedSession
from tuning_world import configuration

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError, PlanError, TuningError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.measure import replica_calls
from lightning_autosync.measure.bench.output import EXACT
from lightning_autosync.measure.bench.preparation import Preparation
from lightning_autosync.measure.bench.result import BenchResult, ContenderMeasurement
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.search.hybrid.result import HybridTrial
from lightning_autosync.search.hybrid.run import HybridTuningRun
from lightning_autosync.search.tuning.comparison import judged
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.settings import TuningSettings

CLUSTER = ClusterSpec.uniform(2, 1, "10 Mbit/s", name="slow")


def hybrid_configuration(memory: float | None = None, **groups: Any) -> dict[str, Any]:
    return {
        **configuration(),
        "model": {"kind": "perceptron", "widths": [512, 16, 512, 16], "batch": 4},
        "cluster": CLUSTER.to_dict(),
        **groups,
        "parallel": {"kind": "hybrid", "memory": memory, "trials": 4, **groups.get("parallel", {})},
    }


def hybrid_run(memory: float | None, directory: Path, **groups: Any) -> HybridTuningRun:
    return HybridTuningRun(TuningSettings.parse(hybrid_configuration(memory, **groups)), directory, ExitStack())


def entries(memory: float | None, directory: Path) -> list[Any]:
    return hybrid_run(memory, directory)._entries(HybridRates())


def test_nothing_over_the_limit_of_memory_is_measured(tmp_path: Path) -> None:
    free = entries(None, tmp_path)
    (megatron,) = [entry for entry in free if entry.origin == "megatron"]
    whole = next(entry.candidate.memory for entry in free if entry.origin == "builder")
    assert megatron.candidate.memory < whole
    tight = entries(0.9 * megatron.candidate.memory, tmp_path)
    assert {entry.origin for entry in tight} == {"ddp", "search"}
    assert all(entry.candidate.memory <= 0.9 * megatron.candidate.memory for entry in tight[1:])


def test_a_limit_into_which_nothing_fits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"parallel\.memory: no plan fits into 1 kB per rank"):
        entries(1e3, tmp_path)


def test_each_batch_and_each_result_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = hybrid_run(None, tmp_path)
    chosen = [entry for entry in run._entries(HybridRates()) if entry.origin in ("ddp", "builder")][:5]
    session: Any = PricedSession(lambda name, order: 0.1)
    trials = run._open()
    run._measure(session, trials, chosen)
    names = [entry.name for entry in chosen]
    said = [record.message for record in caplog.records if "search" in record.name]
    assert [line for line in said if line.startswith("measuring")] == [
        f"measuring DDP and plans, 1 to 3 of 5: {', '.join(names[:3])}",
        f"measuring DDP and plans, 4 to 5 of 5: {', '.join(names[3:])}",
    ]
    assert {trial.name for trial in trials.records()} == set(names)


def test_a_plan_may_need_gigabytes() -> None:
    assert HybridTrial(number=1, name="split", origin="search", state="complete", memory=2e10).memory == 2e10


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_deviate(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replica_calls._live, "split", None)
    monkeypatch.setitem(replica_calls._kept_gradients, "ddp", [torch.ones(3)])
    monkeypatch.setattr(replica_calls, "_gradients", lambda replica: [torch.tensor([1.0, wrong, 1.0])])
    assert max([0.0, replica_calls.deviation("split", "ddp")]) > EXACT


def test_a_split_model_with_other_gradients_never_wins() -> None:
    given = {name: value for name, value in configuration().items() if name in ("model", "cluster")}
    times = {"ddp": 3.0, "split": 1.0}
    settings = BenchSettings.parse({**given, "contenders": {"split": {"plan": "x.yaml"}}, "rounds": 2})
    job = TuningJob.of(TuningSettings.parse(configuration()))
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),))
    for deviation in (0.0, 1.0):
        measurements = {
            name: ContenderMeasurement([[[one]]] * 2, None, None, deviation * (name == "split"))
            for name, one in times.items()
        }
        preparation = Preparation(job.cluster, job.workload, {}, dict.fromkeys(times, "exact"), {})
        result = BenchResult(settings, preparation, None, {}, measurements)
        if deviation:
            with pytest.raises(TuningError, match="every plan's gradients differ from DDP's"):
                judged(result, {"split": plan}, ["ddp"])
        else:
            assert judged(result, {"split": plan}, ["ddp"])["winner"] == "split"


@pytest.mark.parametrize("where", ["parallel", "transfer"])
def test_rates_of_an_earlier_run_are_taken(tmp_path: Path, where: str) -> None:
    HybridRates(layer=0.125).save(tmp_path / "earlier.yaml")
    run = hybrid_run(None, tmp_path / "run", **{where: {"rates": str(tmp_path / "earlier.yaml")}})
    unused: Any = None
    assert run._rates(unused).layer == 0.125


def test_rates_are_of_use_to_hybrid_runs_only() -> None:
    given = {**configuration(), "transfer": {"rates": "rates.yaml"}}
    with pytest.raises(DocumentError, match=r"transfer\.rates: allowed with parallel=hybrid only"):
        TuningSettings.parse(given)
