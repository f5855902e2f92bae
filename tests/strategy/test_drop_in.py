"""What users rely on beside the weights is as with DDP: buffers, hooks, the wrapper, ignored parameters, arguments."""

from __future__ import annotations

import inspect
import sys

import drop_in_jobs
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from sweeps import crossed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy


def both(duo, **job) -> tuple[list[list[float]], list[list[float]]]:
    ours, theirs = (duo.run(drop_in_jobs.run, strategy=strategy, **job) for strategy in ("autosync", "ddp"))
    assert all(len(seen) > 20 for seen in theirs)
    return ours, theirs


@pytest.mark.parametrize(
    ("job", "average"), crossed(["Records", "Manual", "Accumulates", "Hooked", "Ignoring"], [False, True])
)
def test_a_job_sees_what_it_sees_under_ddp(duo, job: str, average: bool) -> None:
    ours, theirs = both(duo, job=job, average=average)
    assert [pytest.approx(seen, abs=1e-6) for seen in theirs] == ours


@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_stay_each_ranks_own_where_they_do_under_ddp(duo, option: str) -> None:
    if option not in inspect.signature(DistributedDataParallel).parameters:
        pytest.skip(f"this torch has no {option}")
    ours, theirs = both(duo, job="Records", **{option: False})
    assert [pytest.approx(seen, abs=1e-6) for seen in theirs] == ours
    assert theirs[0] != theirs[1]


def test_what_is_ignored_stays_each_ranks_own(duo) -> None:
    first, second = duo.run(drop_in_jobs.run, strategy="autosync", job="Ignoring")
    assert (first[0], second[0]) == (0.0, 1.0)  # the buffer
    assert first[-2:] != second[-2:]  # the layer


def test_fabric_broadcasts_buffers_where_ddp_does(duo) -> None:
    ours = duo.run(drop_in_jobs.run_fabric, strategy="autosync")
    theirs = duo.run(drop_in_jobs.run_fabric, strategy="ddp")
    assert [pytest.approx(seen, abs=1e-6) for seen in theirs] == ours


def test_averaging_plans_refuse_ignored_parameters(duo) -> None:
    words = "_ddp_params_and_buffers_to_ignore names 'own.weight', but mode 'periodic' averages"
    with pytest.raises(Exception, match=words):
        duo.run(drop_in_jobs.run, strategy="autosync", job="Ignoring", plan="periodic", semantics="relaxed")


DDP_OPTIONS = {
    "bucket_cap_mb": 7,
    "broadcast_buffers": False,
    "find_unused_parameters": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
}


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoSyncFabricStrategy])
def test_the_arguments_of_ddp_are_named_ones(strategy) -> None:
    parameters = inspect.signature(strategy).parameters
    assert DDP_OPTIONS.keys() <= parameters.keys()
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    strategy(**DDP_OPTIONS)


def test_the_command_line_of_lightning_takes_the_arguments_of_ddp(monkeypatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from models import Plain

    options = [f"--trainer.strategy.init_args.{name}={value}" for name, value in DDP_OPTIONS.items()]
    more = ["--trainer.strategy.init_args.timeout=60.0", "--trainer.strategy.init_args.plan=all_reduce"]
    chosen = "--trainer.strategy=lightning_autosync.AutoSyncStrategy"
    monkeypatch.setattr(sys, "argv", ["train.py", chosen, *options, *more, "--trainer.accelerator=cpu"])
    strategy = LightningCLI(Plain, run=False, save_config_callback=None).trainer.strategy
    assert isinstance(strategy, AutoSyncStrategy)
    assert strategy._settings.gradient_as_bucket_view
    assert not strategy._settings.broadcast_buffers
    assert strategy._settings.timeout == 60.0
    assert strategy._settings.bucket_bytes == 7 * 2**20


def test_every_argument_of_lightnings_strategy_is_there() -> None:
    ours = inspect.signature(AutoSyncStrategy).parameters
    theirs = inspect.signature(DDPStrategy).parameters
    assert {name for name, found in theirs.items() if found.kind is not inspect.Parameter.VAR_KEYWORD} <= ours.keys()


def test_the_users_module_is_back_after_training() -> None:
    from models import Plain

    module: nn.Module = Plain()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AutoSyncStrategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    assert trainer.model is module
