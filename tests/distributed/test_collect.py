"""`autosync collect` for real: a tiny collection on emulated links, interrupted and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_autosync.cli.collect import collect
from lightning_autosync.lab.collection import collector
from lightning_autosync.lab.collection.settings import CollectionResult
from lightning_autosync.learned.dataset import Dataset
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.plan import compile_plan

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]


@pytest.mark.slow
def test_an_interrupted_collection_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration: dict[str, Any] = {
        "dataset": str(tmp_path / "data"),
        "pairs": 8,
        "clusters": [{"name": "pair", "star": {"bandwidths": ["100 Mbit/s", "50 Mbit/s"]}}],
        "families": ["vgg16"],
        "variants": 1,
        "passes": 1,
        "batch": 3,
        "quiet": 1000.0,
        "seconds": 0.05,
        "steps": [2, 3],
    }
    with monkeypatch.context() as patched:
        patched.setattr(collector.Collector, "_measure_batch", _interrupt_after(2))
        with pytest.raises(KeyboardInterrupt):
            collect(configuration, tmp_path / "first")
    assert len(Dataset.load(tmp_path / "data")) == 6

    collect(configuration, tmp_path / "second")
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    assert CollectionResult.read(tmp_path / "second").to_dict() == result
    assert (result["pairs"], result["measured"], result["failed"]) == (8, 2, [])
    dataset = Dataset.load(tmp_path / "data")
    assert len({sample.plan.fingerprint for sample in dataset}) == 8
    for sample in dataset:
        assert 1 <= len(sample.steps) <= 3
        assert sample.seconds > sample.workload.forward_time + sample.workload.backward_time
        assert compile_plan(sample.plan, sample.workload, sample.cluster).world_size == 2
    frame = dataset.frame()
    assert list(frame["kind"]).count("reference") == 1
    assert (frame["reference"] > 0).all()
    assert (frame["replayed"] > 0).all()
    (environment,) = dataset.environments.values()
    assert {"torch", "kernel", "processor", "cores", "tcp_congestion_control", "versions"} <= environment.keys()
    assert "| pair |" in (tmp_path / "data" / "README.md").read_text()


def _interrupt_after(batches: int) -> Any:
    """The method that measures a batch, as if somebody pressed Ctrl-C after some."""
    original, given = collector.Collector._measure_batch, [0]

    def measure(self: collector.Collector, *arguments: Any) -> Any:
        given[0] += 1
        if given[0] > batches:
            raise KeyboardInterrupt
        return original(self, *arguments)

    return measure
