"""Callbacks that would leave relaxed replicas with different models are refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Consistency
from lightning_autosync.strategy.trainer import check_trainer

PERIODIC = {"mode": "periodic", "period": 8, "outer": "averaging"}


@pytest.mark.parametrize("settings", [PERIODIC, {"mode": "asynchronous"}, {"mode": "synchronous", "served": True}])
@pytest.mark.parametrize("kind", [EMAWeightAveraging, WeightAveraging])
def test_averages_of_each_ranks_own_weights(settings: dict[str, Any], kind: Any) -> None:
    # The average of the average's epochs is made when all ranks have the same model.
    callbacks = [StochasticWeightAveraging(0.1), kind()]
    trainer = SimpleNamespace(callbacks=callbacks, lr_scheduler_configs=[], gradient_clip_val=None)
    told = f"callbacks: {kind.__name__} averages each rank's own weights, so under mode '{settings['mode']}'"
    refused = pytest.raises(PlanError, match=told) if settings["mode"] != "synchronous" else nullcontext()
    with refused:
        check_trainer(trainer, Consistency(**settings), None)
