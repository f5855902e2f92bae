"""A user's own module and batches as a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from itertools import cycle, islice
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn

from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.models.model import BATCHES, Batch, Model
from lightning_autosync.targets import find, make


class Imported(Model):
    """A user's module, made by a class or function that is imported by name, and its batches; computation is real.

    The loss comes from ``loss`` if given, else from the module's ``training_step`` if it has one, else from the module
    itself. All contenders use plain SGD, whatever ``configure_optimizers`` returns.

    Attributes:
        target: ``package.module.Class``. In a document the field is ``_target_``, as for Hydra.
        arguments: arguments of the target, which may contain a ``_target_`` of their own. Unknown fields beside the
            target are added to them.
        data: the same for the batches: a LightningDataModule, a DataLoader, or any iterable. None uses the module's own
            ``train_dataloader``.
        loss: ``package.module.function``, called with the module's output and the last part of a batch.
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
        return with_arguments(value, {*cls.model_fields, "_target_"})

    @property
    def title(self) -> str:
        return self.target.rpartition(".")[2].lower()

    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        made = make("model", {"_target_": self.target, **self.arguments}, nn.Module)
        if not getattr(made, "automatic_optimization", True):
            raise DocumentError(
                f"model: '{self.target}' uses manual optimization, so its steps cannot be measured alone"
            )
        _Loss(made, None if self.loss is None else find("model.loss", self.loss)).install()
        return made

    def batches(self, rank: int) -> list[Batch]:
        found = list(islice(cycle(islice(self._source(), rank + BATCHES)), rank, rank + BATCHES))
        if not found:
            raise DocumentError(f"model: '{self.target}': its data loader returns no batch")
        return [(batch,) for batch in found]

    def _described_module(self, sparse: bool) -> nn.Module:
        return self.module()  # a user's constructor may need values

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
            raise DocumentError(f"model.data: expected an iterable of batches, got {type(given).__name__}")
        return given

    def _own_batches(self) -> Any:
        loader = getattr(self.module(), "train_dataloader", None)
        why = ""
        try:
            found = loader() if loader is not None else None
        except Exception as error:  # if not overridden, Lightning's hook raises Lightning's own exception class
            found, why = None, f": {error}"
        if found is None:
            raise DocumentError(
                f"model.data: missing; '{self.target}' has no train_dataloader, so add "
                f"+model.data._target_=package.module.DataModule{why}"
            )
        return found


def with_arguments(value: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Plain data in which keys that are no fields are items of the field ``arguments``."""
    own = {name: value[name] for name in value if name in fields}
    beside = {name: value[name] for name in value if name not in fields}
    return {**own, "arguments": {**own.get("arguments", {}), **beside}}


class _Loss:
    """Replaces a module's forward: called with a batch, it returns the loss.

    The module's own forward is restored while the step runs, since the step calls it. Lightning does the same.
    """

    def __init__(self, module: nn.Module, loss: Any) -> None:
        self._module = module
        self._loss = loss
        self._step = getattr(module, "training_step", None)

    def install(self) -> None:
        """Replace the module's forward, and disable its logging, which would need a trainer."""
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
                f"model: a step returned {type(output).__name__}; it must return the loss, or set model.loss"
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
