"""`Model`: what a recipe tells about a module and its batches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.documents import Record
from lightning_autosync.workload import Workload, describe, large_tables
from lightning_autosync.workload.spec import Kind

Batch = tuple[Tensor, ...]
Embeddings = Literal["dense", "sparse", "rows"]
MIB = 1024 * 1024
BATCHES = 8


class Model(Record):
    """A recipe of a module and its batches.

    Attributes:
        learning_rate: learning rate of plain SGD for all parameters; None for no optimizer.
    """

    learning_rate: PositiveFloat | None = 0.01

    @abstractmethod
    def module(self, sparse: bool = False, speed: float = 1.0) -> nn.Module:
        """A new module that returns the loss of a batch.

        Args:
            sparse: whether embeddings have sparse gradients.
            speed: relative speed of the rank's node; only paced computation uses it.
        """

    def optimizer(self, module: nn.Module) -> Optimizer | None:
        """The optimizer of such a module, if it has one."""
        return None if self.learning_rate is None else torch.optim.SGD(module.parameters(), self.learning_rate)

    @abstractmethod
    def batches(self, rank: int) -> list[Batch]:
        """The batches that ``rank`` uses in turn."""

    @property
    def title(self) -> str:
        """A short name for people."""
        return type(self).__name__.lower()

    def workload(self, embeddings: Embeddings) -> Workload:
        """The workload with this kind of embedding gradients; ``rows`` applies to large tables only, as in jobs."""
        module = self._described_module(embeddings == "sparse")
        workload = describe(module, name=self.title)
        return with_kind(workload, large_tables(module), "row_sparse") if embeddings == "rows" else workload

    def _described_module(self, sparse: bool) -> nn.Module:
        """A module whose parameters need no memory."""
        with torch.device("meta"):
            return self.module(sparse)


def with_kinds_of(planned: Workload, measured: Workload) -> Workload:
    """A measured workload whose dense gradients travel as in another workload of the same model: whole, or by rows."""
    tables = {variable.name for variable in planned.variables if variable.kind == "row_sparse"}
    whole = {variable.name for variable in measured.variables if variable.kind == "row_sparse"} - tables
    return with_kind(with_kind(measured, whole, "dense"), tables, "row_sparse")


def with_kind(workload: Workload, tables: set[str], kind: Kind) -> Workload:
    """The workload with gradients of ``tables`` of the given kind; dense gradients touch all rows."""
    update: dict[str, Any] = {"kind": kind, **({"rows": None} if kind == "dense" else {})}
    variables = (v.model_copy(update=update) if v.name in tables else v for v in workload.variables)
    return workload.model_copy(update={"variables": tuple(variables)})
