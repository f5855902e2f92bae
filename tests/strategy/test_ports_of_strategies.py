"""The argument ``port_range`` of the strategies."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from models import Plain

from lightning_autosync import AutoDDLStrategy, AutoSyncFabricStrategy, AutoSyncStrategy
from lightning_autosync.errors import DocumentError
from lightning_autosync.ports import VARIABLE, port_range


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoDDLStrategy, AutoSyncFabricStrategy])
@pytest.mark.parametrize("value", [20000, (20000,), (20100, 20000), ("a", "b"), (20000, 70000), (1.5, 2)])
def test_strategies_refuse_other_values(strategy: type[Any], value: Any) -> None:
    with pytest.raises(
        DocumentError, match=r"^port_range: got .*; allowed: the first and the last port, from 1 to 65535"
    ):
        strategy(port_range=value)


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoDDLStrategy])
def test_a_job_listens_within_the_range_of_its_strategy_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Any]
) -> None:
    monkeypatch.setenv(VARIABLE, "30000-30100")
    seen = []

    class Look(Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(port_range())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        strategy=strategy(port_range=[20000, 20100]), accelerator="cpu", devices=1, max_steps=1, callbacks=[Look()],
        enable_model_summary=False, **quiet,
    )  # fmt: skip
    trainer.fit(Plain())
    assert seen == [(20000, 20100)]
    assert port_range() == (30000, 30100)
