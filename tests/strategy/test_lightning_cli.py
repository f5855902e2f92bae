"""LightningCLI sees every argument of the strategies: on its command line, in its help and in its configurations."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from models import Plain

from lightning_autosync import AutoDDLStrategy, AutoSyncStrategy
from lightning_autosync.strategy.tuning.settings import TuningSettings

AUTOSYNC = "lightning_autosync.AutoSyncStrategy"
PYTORCH = "lightning_autosync.strategy.pytorch.AutoSyncStrategy"
AUTODDL = "lightning_autosync.AutoDDLStrategy"
DDP_OPTIONS = {
    "find_unused_parameters": True,
    "process_group_backend": "gloo",
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "broadcast_buffers": False,
    "bucket_cap_mb": 7.0,
    "start_method": "spawn",
}
CPU = "--trainer.accelerator=cpu"


@pytest.fixture(autouse=True)
def _own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns of another command line than its own


def strategy_of(*line: str) -> Any:
    return LightningCLI(Plain, run=False, save_config_callback=None, args=list(line)).trainer.strategy


def printed(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    with pytest.raises(SystemExit) as ended:
        strategy_of(*line)
    assert ended.value.code == 0
    return capsys.readouterr().out


def options(given: dict[str, Any], names: str = "--trainer.strategy") -> list[str]:
    return [f"{names}.{name}={str(value).lower()}" for name, value in given.items()]


def test_arguments_of_ddp_stand_directly_below_the_strategy() -> None:
    strategy = strategy_of(f"--trainer.strategy={AUTOSYNC}", *options(DDP_OPTIONS), CPU)
    assert isinstance(strategy, AutoSyncStrategy)
    assert strategy.process_group_backend == "gloo"
    assert strategy._start_method == "spawn"
    settings = strategy._settings
    assert (settings.gradient_as_bucket_view, settings.static_graph, settings.broadcast_buffers) == (True, True, False)
    assert settings.bucket_bytes == 7 * 2**20


def test_own_arguments_are_read_in_their_types() -> None:
    own = {"cluster": "two_nodes_of_four", "tuning.plans": 2, "timeout": 60.0, "overlap": "step"}
    settings = strategy_of(f"--trainer.strategy={AUTOSYNC}", *options(own), CPU)._settings
    assert settings.cluster.name == "two_nodes_of_four"
    assert settings.tuning == TuningSettings(plans=2)
    assert (settings.timeout, settings.overlap) == (60.0, "step")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["ddp_comm_hook=print"], "ddp_comm_hook: not supported, because there is no DistributedDataParallel"),
        (["model_averaging_period=2"], "model_averaging_period: not supported"),
        (["find_unused=true"], "find_unused"),
        (["semantics=loose"], "semantics"),
    ],
)
def test_what_is_refused_is_told(capsys: pytest.CaptureFixture[str], line: list[str], message: str) -> None:
    with pytest.raises((SystemExit, ValueError)) as ended:
        strategy_of(f"--trainer.strategy={AUTOSYNC}", *(f"--trainer.strategy.{each}" for each in line), CPU)
    assert message in capsys.readouterr().err + str(ended.value)


@pytest.mark.parametrize("strategy", [AUTOSYNC, AUTODDL, PYTORCH])
def test_help_describes_every_argument(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    made = import_module("pytorch_lightning.cli" if strategy == PYTORCH else "lightning.pytorch.cli").LightningCLI
    module, _, name = strategy.rpartition(".")
    arguments = inspect.signature(getattr(import_module(module), name)).parameters
    with pytest.raises(SystemExit):
        made(run=False, args=[f"--trainer.strategy.help={strategy}"])
    text = capsys.readouterr().out
    assert strategy in text
    parts = re.split(r"^  --trainer\.strategy\.(?:init_args\.)?", text, flags=re.MULTILINE)[1:]
    told = {re.split(r"[ .\n]", part)[0]: " ".join(part.split("\n", 1)[-1].split()) for part in parts}
    assert arguments.keys() <= told.keys()
    assert not [name for name in arguments if not re.match(r"[\w`][^()]*", told[name])]


@pytest.mark.parametrize("strategy", [AUTOSYNC, AUTODDL])
def test_a_configuration_makes_the_strategy_that_printed_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    changed = {"cluster": "four_equal", "broadcast_buffers": False, "check_replicas": 7}
    line = [f"--trainer.strategy={strategy}", *options({**changed, "timeout": 90.0}), CPU]
    text = printed(capsys, *line, "--print_config")
    recipe = yaml.safe_load(text)["trainer"]["strategy"]
    assert recipe["class_path"] == strategy
    assert changed.items() <= recipe["init_args"].items()
    (tmp_path / "config.yaml").write_text(text)
    again = ["--config", str(tmp_path / "config.yaml")]
    assert printed(capsys, *again, "--print_config") == text
    assert strategy_of(*again)._settings == strategy_of(*line)._settings


def test_defaults_survive_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Without arguments, a class path is taken for a registered name, of DDPStrategy too, unless it is named so.
    text = printed(capsys, f"--trainer.strategy.class_path={AUTOSYNC}", CPU, "--print_config")
    (tmp_path / "config.yaml").write_text(text)
    assert strategy_of("--config", str(tmp_path / "config.yaml"))._settings == AutoSyncStrategy()._settings


@pytest.mark.parametrize("name", ["autosync", "autosync_allreduce", "autosync_partial_reduce", "autoddl"])
def test_registered_names_work(name: str) -> None:
    strategy = strategy_of(f"--trainer.strategy={name}", CPU)
    assert isinstance(strategy, AutoDDLStrategy if name == "autoddl" else AutoSyncStrategy)
