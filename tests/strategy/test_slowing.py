"""Ranks made slow on purpose in a Trainer: before they exchange anything, as much as was asked for, once a batch."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from models import Plain

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.errors import DocumentError
from lightning_autosync.strategy.slowing.callback import BACKWARD
from lightning_autosync.strategy.slowing.lightning import SlowRanks
from lightning_autosync.targets import make_arguments

FOURFOLD = {"ranks": [0], "factor": 4.0}


class Watched(Plain):
    """Notes what happens when."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def training_step(self, batch: Any, index: int) -> Any:
        self.events.append("forward")
        return super().training_step(batch, index)

    def on_after_backward(self) -> None:
        self.events.append("backward")


class Silent(Watched):
    """Some of whose batches make no gradients."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return None if index == 1 else loss


def train(callback: Any, module: Any, framework: str = "lightning.pytorch", batches: int = 3) -> None:
    import_module(framework).Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)


def test_a_rank_sleeps_between_forward_and_backward_of_each_batch_in_its_time() -> None:
    events: list[Any] = []
    slowdowns = [{**FOURFOLD, "begin": 1, "end": 3}, {"ranks": [0], "factor": 2.0, "begin": 2}]
    train(SlowRanks(slowdowns, compute=0.5, sleep=events.append), Watched(events), batches=4)
    assert events == [
        *("forward", "backward"),
        *("forward", 1.5, "backward"),
        *("forward", 3.5, "backward"),
        *("forward", 0.5, "backward"),
    ]


def test_a_batch_without_backward_is_slow_too() -> None:
    events: list[Any] = []
    train(SlowRanks([FOURFOLD], compute=1.0, sleep=events.append), Silent(events))
    assert events == ["forward", 3.0, "backward", "forward", 3.0, "forward", 3.0, "backward"]


def test_how_long_a_batch_computes_is_measured_by_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    slow = SlowRanks([FOURFOLD], sleep=slept.append)
    now = [0.0]
    monkeypatch.setattr("lightning_autosync.strategy.slowing.callback.time.perf_counter", lambda: now[0])

    class Slow(Plain):
        def training_step(self, batch: Any, index: int) -> Any:
            now[0] += 0.2
            return super().training_step(batch, index)

        def on_after_backward(self) -> None:
            now[0] += 100.0

    train(slow, Slow())
    assert slept == pytest.approx([3.0 * (1.0 + BACKWARD) * 0.2] * 3)


@pytest.mark.parametrize("overlaid", [{"overlap": "step"}, {"batch_shares": [1], "micro_batch": 2}])
def test_computation_is_given_where_the_forward_pass_does_not_tell_it(overlaid: dict[str, Any]) -> None:
    pause = {"pause_probability": 0.1, "pause": 0.1}
    trainer: Any = SimpleNamespace(world_size=1, global_rank=0, strategy=AutoSyncStrategy(**overlaid))
    with pytest.raises(DocumentError, match="SlowRanks: compute: missing; with micro_batch or overlap"):
        SlowRanks([pause, FOURFOLD]).on_train_start(trainer)
    SlowRanks([pause]).on_train_start(trainer)
    SlowRanks([FOURFOLD], compute=0.5).on_train_start(trainer)


@pytest.mark.parametrize("framework", ["lightning", "pytorch"])
def test_a_configuration_makes_it_for_either_framework(framework: str) -> None:
    target = f"lightning_autosync.strategy.slowing.{framework}.SlowRanks"
    made = make_arguments("trainer", {"callbacks": [{"_target_": target, "slowdowns": [FOURFOLD], "compute": 0.001}]})
    (callback,) = made["callbacks"]
    slept: list[float] = []
    callback._sleep = slept.append
    train(callback, *models_of(framework))
    assert slept == pytest.approx([0.003] * 3)


def models_of(framework: str) -> tuple[Any, str]:
    """A module of the framework, and its name."""
    if framework == "lightning":
        return Plain(), "lightning.pytorch"
    module: Any = import_module("pytorch_lightning").LightningModule

    class Own(module):  # type: ignore[misc]
        training_step = Plain.training_step
        forward = Plain.forward
        configure_optimizers = Plain.configure_optimizers
        train_dataloader = Plain.train_dataloader

    made, like = Own(), Plain()
    made.body, made.head = like.body, like.head
    return made, "pytorch_lightning"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slowdowns": [{"factor": 0.5}]}, r"SlowRanks: slowdowns\[0\].factor: .*greater than or equal to 1"),
        ({"slowdowns": [{"speed": 2}]}, r"SlowRanks: slowdowns\[0\].speed: unknown field"),
        (
            {"slowdowns": [], "compute": 0.0},
            "SlowRanks: compute: expected seconds above 0, or None to measure them; got 0",
        ),
    ],
)
def test_nonsense_is_refused_in_a_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message) as caught:
        SlowRanks(**arguments)
    assert "\n" not in str(caught.value)


def test_a_rank_that_there_is_not_is_refused() -> None:
    message = r"SlowRanks: slowdowns\[1\].ranks: there is no rank 3; allowed: 0 to 0"
    with pytest.raises(DocumentError, match=message):
        train(SlowRanks([FOURFOLD, {"ranks": [3], "factor": 2.0}]), Plain())
