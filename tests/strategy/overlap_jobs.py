"""What ranks do in tests of ``overlap="step"``: train with it and without, and compare bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jobs
import models
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import step_overlap

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "foreach": partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "fused": partial(torch.optim.Adam, lr=0.05, fused=True),
    "learning rate as a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05)),
}


class Chosen(models.Plain):
    """Trains with one of the optimizers, in two groups, by a schedule of learning rates per step."""

    optimizer = "SGD"

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.body.parameters()), "weight_decay": 0.1}, {"params": self.head.parameters()}]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@contextmanager
def late_steps() -> Iterator[list[int]]:
    """A list to which the number of parameters that are stepped late, and those whose gradient came late, is added."""
    found = [0, 0]
    real = step_overlap._apply

    def count(due: Any) -> None:
        found[0] += sum(what.step is not None for _, what in due)
        found[1] += sum(what.step is None for _, what in due)
        real(due)

    with mock.patch.object(step_overlap, "_apply", count):
        yield found


def train(
    module: LightningModule, strategy: dict[str, Any], half: bool = False, **arguments: Any
) -> tuple[dict[str, Tensor], list[int], Any]:
    """Train with ``strategy``; returns the weights, the counts of `late_steps`, and the Trainer."""
    options = dict(strategy)
    if "cluster" in options:
        options["cluster"] = ClusterSpec.from_dict(options["cluster"])
    plugins = jobs._scaler(half)
    with late_steps() as late:
        trainer = jobs.make_trainer(AutoSyncStrategy(**options), plugins, **arguments)
        trainer.fit(module)
    return {name: value.clone() for name, value in jobs.state(module).items()}, late, trainer


def both(make: Callable[[], LightningModule], strategy: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    """Names of weights that overlap changes, whether training changed weights, and the counts of `late_steps`."""
    weights, late = [], []
    for options in ({}, {"overlap": "step", "overlap_debug": True}):
        seed_everything(3)
        module = make()
        start = copy.deepcopy(jobs.state(module))
        found, counted, _ = train(module, {**(strategy or {}), **options}, **copy.deepcopy(arguments))
        weights.append(found)
        late.append(counted)
    assert late[0] == [0, 0]
    different = [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]
    moved = any(not torch.equal(value, weights[0][name].to(value.dtype)) for name, value in start.items())
    return [different, moved, late[1]]


def compare(model: str, strategy: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    return both(getattr(models, model), strategy, **arguments)


def optimizers(**arguments: Any) -> dict[str, list[Any]]:
    """The result of `both` for each of the optimizers, in 20 steps."""

    def make(name: str) -> LightningModule:
        module = Chosen()
        module.optimizer = name
        return module

    arguments = {"max_epochs": 3, "max_steps": 20, **arguments}
    small = {"bucket_cap_mb": 1e-4}
    return {name: both(partial(make, name), small, **arguments) for name in OPTIMIZERS}
