"""Plans that split operators, beside DDP in a bench on real ranks; rates measured on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.conversions import COLLECTIVES
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.search import search
from lightning_autosync.measure.bench.preparation import prepare
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hybrid.calibration import calibrate
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.models.model import Model
from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.session import MeasurementSession

SLOW = ClusterSpec.uniform(4, 1, "100 Mbit/s")
MODELS: dict[str, dict[str, Any]] = {
    "perceptron": {"kind": "perceptron", "widths": [64, 256, 256, 16], "batch": 4},
    "vgg": {"kind": "vgg", "size": 8, "channels": [4, 8], "hidden": 64, "classes": 8, "batch": 4},
    "transformer": {
        "kind": "transformer",
        "vocabulary": 64,
        "width": 32,
        "heads": 4,
        "layers": 2,
        "length": 8,
        "batch": 2,
    },
}


def _plans(model: Model, directory: Path) -> dict[str, str]:
    """Files of the plans that a search finds, and of the Megatron alternation."""
    with torch.device("meta"):
        module = model.module()
    found = search(capture(module, *model.batches(0)[0]), SLOW, HybridRates(cores=2), keep=3)
    assert found.megatron is not None
    plans = {f"plan_{number}": candidate.plan for number, candidate in enumerate((*found.plans, found.megatron))}
    for name, plan in plans.items():
        plan.save(directory / f"{name}.yaml")
    return {name: str(directory / f"{name}.yaml") for name in plans}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["transformer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("perceptron", "vgg"))]
)
def test_split_operators_compute_ddp_gradients(name: str, tmp_path: Path) -> None:
    model = model_of(MODELS[name])
    contenders = {name: {"plan": path} for name, path in _plans(model, tmp_path).items()}
    settings = {"model": MODELS[name], "ranks": 4, "warm_up": 1, "rounds": 1, "steps": 2, "contenders": contenders}
    result = run_bench(BenchSettings.parse(settings))
    assert set(result.measurements) == {"ddp", *contenders}
    assert all(result.classes[name] == "exact" for name in contenders)
    for measurement in result.measurements.values():
        assert measurement.deviation < 1e-5
        assert all(seconds > 0 for seconds in measurement.times)


def test_a_plan_for_another_model_is_refused_before_workers_start(tmp_path: Path) -> None:
    path = _plans(model_of(MODELS["vgg"]), tmp_path)["plan_0"]
    settings = {"model": MODELS["perceptron"], "ranks": 4, "contenders": {"other": {"plan": path}}}
    with pytest.raises(DocumentError, match=r"contenders.other: .*plan_0.yaml: workload: it was made for another"):
        prepare(BenchSettings.parse(settings))


@pytest.mark.slow
def test_rates_are_measured_with_all_ranks_at_work() -> None:
    with MeasurementSession(SLOW, LaunchSettings(), 60.0) as session:
        rates = calibrate(session, SLOW)
    assert rates.cores is None
    for kind in COLLECTIVES:
        rate = getattr(rates, kind)
        assert rate.call + rate.peer + rate.host + rate.wire > 0
    assert rates.flops > 1e8
    assert HybridRates.from_dict(rates.to_dict()) == rates
