"""`Workload`: the variables and times of a model's training step, as a document."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from lightning_autosync.documents import LARGEST, Document, Index, Record, digest
from lightning_autosync.errors import DocumentError, WorkloadError

DType = Literal["float64", "float32", "float16", "bfloat16"]
Kind = Literal["dense", "sparse", "row_sparse"]
Name = Annotated[str, Field(min_length=1)]

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

ROW_SPARSE_SHARE = 0.5
"""Share of touched rows below which a dense gradient counts as row-sparse."""

MOST_AXES = 64
"""Largest number of axes of a variable, which is torch's limit."""
LONGEST = 1e12
"""Largest time in seconds of any part of a step."""
Time = Annotated[NonNegativeFloat, Field(le=LONGEST)]

READY_SLACK = 0.01
"""Share of the backward time by which a ready time may exceed it, because hand-written times are rounded."""


def is_row_sparse(rows_touched: float, rows: int) -> bool:
    """Whether a dense matrix gradient of ``rows`` rows is worth treating as row-sparse."""
    return rows_touched < ROW_SPARSE_SHARE * rows


class Variable(Record):
    """One trainable parameter and its gradient.

    Attributes:
        name: name in ``named_parameters()``.
        shape: size along each axis; ``()`` for a scalar.
        dtype: floating-point dtype of the parameter and its gradient.
        kind: form of the gradient: ``dense``, ``sparse`` (a sparse COO tensor), or ``row_sparse`` (a dense tensor of
            which a step touches few rows).
        ready: seconds from the start of backward until the gradient is complete; ``None`` if unknown, or if the loss
            does not depend on the parameter.
        rows: mean number of rows touched per step, for sparse kinds; ``None`` if unknown.
    """

    name: Name
    shape: Annotated[tuple[Index, ...], Field(max_length=MOST_AXES)]
    dtype: DType = "float32"
    kind: Kind = "dense"
    ready: Time | None = None
    rows: NonNegativeFloat | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole gradient as a dense tensor."""
        return self.numel * self.dtype_bytes

    @property
    def touched_share(self) -> float:
        """Share of the rows that a step touches; 1 if it is dense, has no rows, or their number is unknown."""
        return self.rows / self.shape[0] if self.rows is not None and self.shape[0] else 1.0

    @model_validator(mode="after")
    def _check_rows(self) -> Variable:
        if self.numel > LARGEST:
            raise ValueError(f"'{self.name}' has more than {LARGEST} elements")
        if self.kind != "dense" and not self.shape:
            raise ValueError(f"'{self.name}' is a scalar and so has no rows; kind must be 'dense'")
        if self.rows is None:
            return self
        if self.kind == "dense":
            raise ValueError(f"'{self.name}' is dense; rows is for kinds 'sparse' and 'row_sparse'")
        if self.rows > self.shape[0]:
            raise ValueError(f"'{self.name}' has {self.shape[0]} rows, of which {self.rows} cannot be touched")
        return self


class Workload(Document):
    """The computation times of a model's training step, and the variables that it synchronizes.

    Attributes:
        variables: the trainable parameters in ``named_parameters()`` order; a tied parameter occurs once.
        forward_time: seconds of the forward pass; 0 if unknown.
        backward_time: seconds of the backward pass; 0 if unknown.
        optimizer_time: seconds of the optimizer step; 0 if unknown.
    """

    FORMAT: ClassVar[str] = "autosync-workload/1"
    ERROR: ClassVar[type[DocumentError]] = WorkloadError

    name: Name
    variables: Annotated[tuple[Variable, ...], Field(min_length=1)]
    forward_time: Time = 0.0
    backward_time: Time = 0.0
    optimizer_time: Time = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(variable.bytes for variable in self.variables)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element in the dtype with the most bytes of gradients."""
        held: Counter[str] = Counter()
        for variable in self.variables:
            held[variable.dtype] += variable.bytes
        return DTYPE_BYTES[held.most_common(1)[0][0]]

    def variable(self, name: str) -> Variable:
        """The variable with this name.

        Raises:
            WorkloadError: there is no such variable.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise WorkloadError(f"workload '{self.name}' has no variable '{name}'") from None

    @cached_property
    def ready_order(self) -> tuple[str, ...]:
        """Names in the order in which backward completes their gradients.

        They are sorted by ready time; variables without one come last. Ties are in reverse order of ``variables``,
        because backward starts at the end of a model.
        """
        backwards = reversed(self.variables)
        by_time = sorted(backwards, key=lambda v: math.inf if v.ready is None else v.ready)
        return tuple(variable.name for variable in by_time)

    @cached_property
    def variables_fingerprint(self) -> str:
        """Digest of names and shapes, to which a plan is bound; it does not depend on dtypes and times."""
        return digest([[variable.name, list(variable.shape)] for variable in self.variables])

    @cached_property
    def _by_name(self) -> dict[str, Variable]:
        return {variable.name: variable for variable in self.variables}

    @model_validator(mode="after")
    def _check_variables(self) -> Workload:
        if self.bytes > LARGEST:
            raise ValueError(f"variables: {self.bytes} bytes in all; allowed: {LARGEST} at most")
        name, count = Counter(variable.name for variable in self.variables).most_common(1)[0]
        if count > 1:
            raise ValueError(f"variables: '{name}' is named {count} times; names must be unique")
        latest = self.backward_time * (1 + READY_SLACK)
        for variable in self.variables:
            if variable.ready is not None and variable.ready > latest:
                raise ValueError(
                    f"variables: '{variable.name}' is ready at {variable.ready} s, "
                    f"after the end of backward (backward_time: {self.backward_time} s)"
                )
        return self
