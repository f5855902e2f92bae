"""Modules of a user's own among the models of a bench: any LightningModule or nn.Module that can be imported."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import cycle, islice
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn

from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.models.models import BATCHES, Batch, Embeddings, Model, with_kind
from lightning_autosync.targets import find, make
from lightning_autosync.workload import Workload, describe


class Imported(Model):
    """A class or function that makes a module, by its name, and batches for it; computation is real.

    The loss is what ``training_step`` returns, of a module that has one; else that of ``loss``; else what the module
    itself returns. Optimizers are plain SGD for all contenders alike, whatever ``configure_optimizers`` says.

    Attributes:
        target: ``package.module.Class``; fields beside those named here are its ``arguments``. In a document it is
            ``_target_``, as for Hydra, and arguments may be made by a ``_target_`` of their own.
        data: the same for what gives batches: a LightningDataModule, a DataLoader, or any iterable. None takes the
            module's own ``train_dataloader``.
        loss: ``package.module.function`` of the module's output and the last part of a batch.
    """

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["imported"]
    target: str = Field(alias="_target_", min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] | None = None
    loss: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = {*cls.model_fields, "_target_"}
        beside = {name: value[name] for name in value if name not in names}
        own = {name: value[name] for name in value if name in names}
        return {**own, "arguments": {**own.get("arguments", {}), **beside}}

    @property
    def title(self) -> str:
        return self.target.rpartition(".")[2].lower()

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        made = make("model", {"_target_": self.target, **self.arguments}, nn.Module)
        if not getattr(made, "automatic_optimization", True):
            raise DocumentError(f"model: '{self.target}': it optimizes manually; its steps cannot be measured alone")
        _Loss(made, None if self.loss is None else find("model.loss", self.loss)).install()
        return made

    def batches(self, rank: int) -> list[Batch]:
        found = list(islice(cycle(islice(self._source(), rank + BATCHES)), rank, rank + BATCHES))
        if not found:
            raise DocumentError(f"model: '{self.target}': its data has no batch")
        return [(batch,) for batch in found]

    def workload(self, embeddings: Embeddings) -> Workload:
        module = self.module()
        tables = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
        workload = describe(module, name=self.title)
        return with_kind(workload, tables, "row_sparse") if embeddings == "rows" else workload

    def _source(self) -> Iterable[Any]:
        if self.data is not None:
            given = make("model.data", self.data)
            if hasattr(given, "train_dataloader"):
                given.prepare_data()
                given.setup("fit")
                given = given.train_dataloader()
        else:
            given = self._own_batches()
        if not isinstance(given, Iterable):
            raise DocumentError(f"model.data: expected batches to iterate over, got {type(given).__name__}")
        return given

    def _own_batches(self) -> Any:
        loader = getattr(self.module(), "train_dataloader", None)
        why = ""
        try:
            found = loader() if loader is not None else None
        except Exception as error:  # Lightning's own raises its own class where nobody overrides it
            found, why = None, f": {error}"
        if found is None:
            raise DocumentError(
                f"model.data: missing; '{self.target}' has no batches of its own, so give "
                f"+model.data._target_=package.module.DataModule{why}"
            )
        return found


class _Loss:
    """Stands for a module's forward: called with a batch, it returns the loss.

    As Lightning does it, the module's own forward is back while the step runs, which calls it.
    """

    def __init__(self, module: nn.Module, loss: Any) -> None:
        self._module = module
        self._loss = loss
        self._step = getattr(module, "training_step", None)

    def install(self) -> None:
        """Put it in place of the module's forward, and mute logging, for there is no trainer."""
        if self._step is not None:
            vars(self._module).update(log=_nothing, log_dict=_nothing)
        vars(self._module)["forward"] = self

    def __call__(self, batch: Any) -> Tensor:
        del vars(self._module)["forward"]
        try:
            output = self._run(batch)
        finally:
            vars(self._module)["forward"] = self
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DocumentError(
                f"model: a step returned {type(output).__name__}; expected the loss, or give model.loss"
            )
        return loss

    def _run(self, batch: Any) -> Any:
        if self._loss is not None:
            *inputs, target = batch
            return self._loss(self._module(*inputs), target)
        if self._step is not None:
            return self._step(batch, 0) if len(inspect.signature(self._step).parameters) > 1 else self._step(batch)
        return self._module(*batch) if isinstance(batch, list | tuple) else self._module(batch)


def _nothing(*_: Any, **__: Any) -> None:
    return None
