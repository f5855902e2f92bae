"""The examples run, and end with the accuracy that a reader would expect."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import forked
import pytest
import yaml

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *line: str, cwd: Path | None = None) -> str:
    done = forked.run([sys.executable, EXAMPLES / f"{name}.py", *line], cwd=cwd, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "trainer",
        pytest.param("fabric", marks=pytest.mark.slow),
        pytest.param("plan_by_hand", marks=pytest.mark.slow),
        pytest.param("split_operators", marks=pytest.mark.slow),
    ],
)
def test_example_trains(name: str) -> None:
    assert accuracy(run(name)) > 0.8


def accuracy(output: str) -> float:
    found = re.search(r"validation accuracy (0\.\d+)", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.slow
def test_lightning_cli_trains_by_a_configuration_alone(tmp_path: Path) -> None:
    config = EXAMPLES / "lightning_cli" / "config.yaml"
    first = run("lightning_cli/main", "fit", "--config", str(config), cwd=tmp_path)
    assert accuracy(first) > 0.8
    saved = tmp_path / "outputs" / "lightning_cli" / "config.yaml"  # by LightningCLI, with all arguments
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["init_args"]["plan"] is None
    shutil.copy(saved, tmp_path / "again.yaml")
    assert accuracy(run("lightning_cli/main", "fit", "--config", "again.yaml", cwd=tmp_path)) == accuracy(first)


@pytest.mark.slow
def test_a_job_of_the_hydra_template_trains_and_equals_ddp(tmp_path: Path) -> None:
    output = run("hydra_template/train", "trainer=autosync", "hydra.run.dir=ours", cwd=tmp_path)
    assert output.startswith("AutoSyncStrategy: validation accuracy")
    assert accuracy(output) > 0.8
    theirs = run("hydra_template/train", "trainer=ddp", "hydra.run.dir=theirs", cwd=tmp_path)
    assert theirs.startswith("DDPStrategy: validation accuracy")
    assert accuracy(output) == accuracy(theirs)


@pytest.mark.slow
def test_recommender_reaches_the_same_loss_both_ways() -> None:
    losses = re.findall(r"loss (\d\.\d+)", run("recommender"))
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_demo_equals_ddp() -> None:
    assert "Weights equal DDP's" in run("demo")
