"""Inside a worker: the times of a model that really computes, while all ranks compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.measure.replicas import SEED
from lightning_autosync.workload import capture


def profile(model: dict[str, Any]) -> dict[str, Any]:
    """The workload of a model as plain data, measured on this rank's first batch."""
    recipe = model_of(model)
    torch.manual_seed(SEED)
    module = recipe.module()
    batch = recipe.batches(dist.get_rank())[0]
    dist.barrier()
    return capture(module, batch, training_step=lambda given: module(*given), name=recipe.title).to_dict()
