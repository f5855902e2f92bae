"""`RayAutoSyncStrategy` in workers that Ray Train starts on this machine."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_autosync.errors import MissingPackageError

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"


def test_a_missing_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lightning_autosync.strategy.ray", raising=False)
    told = r'needs ray, which is not installed: pip install "\.\[ray\]" in a checkout'
    with pytest.raises(MissingPackageError, match=told):
        importlib.import_module("lightning_autosync.strategy.ray")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Ray on this machine, with room for two workers and little memory."""
    ray = pytest.importorskip("ray", exc_type=ImportError)
    paths = os.pathsep.join([str(Path(__file__).parent), str(EXAMPLES), *filter(None, sys.path)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    _start(ray, variables)
    yield ray
    ray.shutdown()


def _start(ray: Any, variables: dict[str, str], attempts: int = 3) -> None:
    """Ray gives its processes 30 s to start, which may be too short beside other tests."""
    try:
        ray.init(
            num_cpus=2,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
    except Exception as error:
        ray.shutdown()
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        _start(ray, variables, attempts - 1)


def run(folder: Path, arguments: dict[str, Any] | None, **config: Any) -> tuple[list[dict[str, Any]], Any]:
    """What each rank leaves behind, and Ray's result; ``arguments`` None trains under Ray's own DDP."""
    import ray_jobs
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder.mkdir()
    result = TorchTrainer(
        ray_jobs.train,
        train_loop_config={"arguments": arguments, "folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage")),
    ).fit()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], result


@pytest.mark.slow
def test_weights_are_those_of_rays_ddp(ray_cluster: Any, tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "ddp", None)
    found, result = run(tmp_path / "ours", {})
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert ours["steps"] == theirs["steps"] == 12
        assert ours["sampler"] == theirs["sampler"] == {"num_replicas": 2, "rank": rank}
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
        assert ours["devices"] == [2]  # two workers on one node, although the Trainer knows of one process
        assert ours["topologies"] == ["shared_memory"]
    assert result.metrics["step"] == 12
    assert {"loss", "val_accuracy"} <= result.metrics.keys()
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder, "checkpoint.ckpt"), weights_only=True)
    kept = [value for tensor in saved["state_dict"].values() for value in tensor.flatten().tolist()]
    assert kept == found[0]["weights"]


@pytest.mark.slow
def test_relaxed_replicas_train(ray_cluster: Any, tmp_path: Path) -> None:
    found, result = run(tmp_path / "ours", {"plan": "partial_reduce", "semantics": "relaxed"}, trainer={})
    assert found[0]["weights"] == pytest.approx(found[1]["weights"], abs=1e-6)
    assert result.metrics["val_accuracy"] > 0.5


@pytest.mark.slow
def test_the_example(ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        importlib.import_module("ray_digits").main(str(tmp_path))
    finally:
        sys.path.remove(str(EXAMPLES))
    assert float(capsys.readouterr().out.split("validation accuracy ")[1]) > 0.8
