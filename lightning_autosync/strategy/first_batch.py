"""A training step on the first batch before training, to capture a model's graph and to check split models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.preservation import preserved


class FirstBatch:
    """The first batch of this rank, and the training step on it, in the Trainer's precision.

    A separate loader reads the batch, and the states of random generators are restored, so training still begins with
    the same batch. A data set that can be iterated over only once loses the samples that are read here.

    Args:
        trainer: the Trainer of either framework, whose model and data are set.
        strategy: the strategy, which moves batches to the device and has the precision plugin.
        combine: the framework's ``CombinedLoader``.

    Attributes:
        batch: the batch, on this rank's device.
        narrowed: the dtype to which autocast narrows numbers within the step; None if it does not.

    Raises:
        WorkloadError: there is no batch, or the model has no training step that takes one.
    """

    def __init__(self, trainer: Any, strategy: Any, combine: Any) -> None:
        self._module = trainer.lightning_module
        self._precision = strategy.precision_plugin.train_step_context
        if not self._module.automatic_optimization:
            raise WorkloadError(
                "the model uses manual optimization, so a training step cannot be run in advance to compare the "
                "split model"
            )
        if "dataloader_iter" in inspect.signature(self._module.training_step).parameters:
            raise WorkloadError(
                "training_step takes dataloader_iter, so a training step cannot be run in advance on one batch"
            )
        with preserved():
            batch = self._load(trainer, combine)
        batch = strategy.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch)
        self.batch = strategy.batch_to_device(batch, dataloader_idx=0)
        kind = strategy.root_device.type
        with self._precision():
            self.narrowed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _load(self, trainer: Any, combine: Any) -> Any:
        loader = trainer.fit_loop._data_source.dataloader()
        combined: Any = loader if isinstance(loader, combine) else combine(loader, "max_size_cycle")
        prepare = trainer._data_connector._prepare_dataloader
        combined.flattened = [prepare(one, shuffle=True, mode=None) for one in combined.flattened]
        for batch, *_ in islice(iter(combined), 1):
            return batch
        raise WorkloadError("the training data loader returned no batch")

    def step(self) -> Any:
        """The loss of the module's training step; nothing is logged."""
        with self._precision():
            return self._loss(self.batch)

    def _loss(self, batch: Any) -> Any:
        given = (batch, 0)
        parameters = inspect.signature(self._module.training_step).parameters
        with silent(self._module):
            output = self._module.training_step(*given[: max(1, min(2, len(parameters)))])
        return output["loss"] if isinstance(output, Mapping) else output

    @contextmanager
    def as_forward(self) -> Iterator[nn.Module]:
        """A context in which the module's ``forward`` is its training step; afterwards the module is restored.

        Restoring matters because a capture with fake tensors leaves some of them in recurrent layers.
        """
        attributes = vars(self._module)
        own = {"forward": attributes["forward"]} if "forward" in attributes else {}

        def forward(batch: Any) -> Any:
            # The training step usually calls the module itself, and then means its own forward.
            del attributes["forward"]
            attributes.update(own)
            try:
                return self._loss(batch)
            finally:
                attributes["forward"] = forward

        # Around the whole capture: torch.export puts what an autocast within ``forward`` covers into one operation.
        with self._precision(), preserved(self._module, without=self._module.parameters()):
            attributes["forward"] = forward
            yield self._module


@contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """A context in which nothing is logged, because Lightning's loops, which collect logged values, do not run yet."""
    with logging_to(module, lambda *_, **__: None):
        yield


@contextmanager
def logging_to(module: nn.Module, log: Callable[..., None]) -> Iterator[None]:
    """A context in which ``log`` gets what is logged: the LightningModule that logs it, and the arguments of its `log`.

    Lightning's ``log_dict`` calls ``log``.
    """
    parts = [part for part in module.modules() if hasattr(part, "log_dict") and hasattr(part, "automatic_optimization")]
    for part in parts:
        vars(part)["log"] = partial(log, part)
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("log", None)
