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
LONG = 840.0
"""Seconds after which an example with several jobs is killed; beside other load they take minutes."""
ACCURACY = r"validation accuracy (\d\.\d+)"


def number(pattern: str, text: str) -> float:
    """The number that a pattern finds."""
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def run(name: str, *line: str, cwd: Path | None = None, timeout: float = 240.0) -> str:
    done = forked.run([sys.executable, EXAMPLES / f"{name}.py", *line], cwd=cwd, capture_output=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "fabric", "plan_by_hand", "split_operators"])
def test_example_trains(name: str) -> None:
    assert number(ACCURACY, run(name)) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_probed_links_lead_to_a_plan_that_is_measured_and_trained_with() -> None:
    told = run("own_links", timeout=LONG)
    predicted = [float(milliseconds) for milliseconds in re.findall(r"([\d.]+) ms of synchronization", told)]
    assert predicted[0] < 0.9 * number(r"([\d.]+) ms of synchronization, all_reduce", told)
    assert predicted == sorted(predicted)
    number(r"speedup over the best DDP (\d+\.\d+)", told)
    assert number(ACCURACY, told) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_split_plan_is_found_and_makes_the_gradients_of_ddp() -> None:
    told = run("hybrid_search", timeout=LONG)
    assert number(r"the best plan: +(\d+\.\d+) ms", told) < number(r"data parallel: +(\d+\.\d+) ms", told)
    assert number(r"gradients of the split step differ from DDP's by (\S+)", told) < 1e-4
    assert number(ACCURACY, told) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_worker_makes_fewer_steps_under_partial_reduce() -> None:
    told = run("slow_worker", timeout=LONG)
    shares = re.findall(r"per second; ([\d.]+)% of them by the slow worker", told)
    assert shares[0] == "25.0"
    assert float(shares[1]) < 24
    assert [float(accuracy) > 0.8 for accuracy in re.findall(ACCURACY, told)] == [True, True]


@pytest.mark.slow
def test_lightning_cli_trains_by_a_configuration_alone(tmp_path: Path) -> None:
    config = EXAMPLES / "lightning_cli" / "config.yaml"
    first = run("lightning_cli/main", "fit", "--config", str(config), cwd=tmp_path)
    assert number(ACCURACY, first) > 0.8
    saved = tmp_path / "outputs" / "lightning_cli" / "config.yaml"  # by LightningCLI, with all arguments
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["init_args"]["plan"] is None
    shutil.copy(saved, tmp_path / "again.yaml")
    assert number(ACCURACY, run("lightning_cli/main", "fit", "--config", "again.yaml", cwd=tmp_path)) == number(
        ACCURACY, first
    )


@pytest.mark.slow
def test_a_job_of_the_hydra_template_trains_and_equals_ddp(tmp_path: Path) -> None:
    output = run("hydra_template/train", "trainer=autosync", "hydra.run.dir=ours", cwd=tmp_path)
    assert output.startswith("AutoSyncStrategy: validation accuracy")
    assert number(ACCURACY, output) > 0.8
    theirs = run("hydra_template/train", "trainer=ddp", "hydra.run.dir=theirs", cwd=tmp_path)
    assert theirs.startswith("DDPStrategy: validation accuracy")
    assert number(ACCURACY, output) == number(ACCURACY, theirs)


@pytest.mark.slow
def test_recommender_reaches_the_same_loss_both_ways() -> None:
    losses = re.findall(r"loss (\d\.\d+)", run("recommender"))
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_optunahub_sampler_gains_over_optunas() -> None:
    told = run("optunahub/package/samplers/autosync/example")
    speedups = {name: float(speedup) for name, speedup in re.findall(r"^(\w+): .*builder: ([\d.]+)$", told, re.M)}
    assert speedups.keys() == {"autosync", "tpe", "random"}
    assert speedups["autosync"] > 1.0
    assert speedups["autosync"] > max(speedups["tpe"], speedups["random"])


@pytest.mark.slow
def test_demo_equals_ddp() -> None:
    assert "Weights equal DDP's" in run("demo")
