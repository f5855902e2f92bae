"""`Graph`: the operators of a model, their work, and the tensors between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightning_autosync.hybrid.plan import Signature
from lightning_autosync.hybrid.signatures import Kind, Rule

INPUT = -1
"""Stands for the model's input as the source of an edge."""


@dataclass(frozen=True)
class Work:
    """The work of an unsplit forward pass on the batch of one rank.

    Attributes:
        flops: floating-point operations of matrix products and convolutions.
        moved: bytes that operations read and write.
        calls: number of operations.
        kept: bytes of results that the backward pass needs.
    """

    flops: float = 0.0
    moved: float = 0.0
    calls: int = 0
    kept: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops, self.moved + other.moved, self.calls + other.calls, self.kept + other.kept
        )


@dataclass(frozen=True)
class Value:
    """A tensor that flows between operators, for the batch of one rank.

    Attributes:
        shape: shape of the whole tensor.
        itemsize: bytes per element.
        batch_axis: axis of the samples; None if there is none.
        differentiable: whether it has a gradient.
    """

    shape: tuple[int, ...]
    itemsize: int
    batch_axis: int | None
    differentiable: bool = True

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Edge:
    """An input of an operator.

    Attributes:
        source: index of the operator that makes it, or `INPUT`.
        value: the tensor at the consumer.
        units: number of equal pieces into which its features may be cut all the way from the source; 1 if they must
            stay whole.
        tensor: name of the tensor, which several operators may take.
    """

    source: int
    value: Value
    units: int = 1
    tensor: str = ""


@dataclass(frozen=True)
class Weight:
    """A parameter of an operator.

    Attributes:
        name: name in its module.
        path: name in ``named_parameters()``; a tied parameter has the same path wherever it is used.
        shape: shape of the whole parameter.
        itemsize: bytes per element.
        trainable: whether it has a gradient.
        outside: whether it also belongs to a module that is not an operator. Then it is whole on each rank, and its
            gradient may have summands of all ranks.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    outside: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Operator:
    """A module that may be split, a join, or an operation on whole values.

    A join is a place where results of several operators come together, as in a residual connection.

    Attributes:
        name: path of the module, or name of the place in the model.
        module: path of the module; None for a join, whose inputs and output share one layout, and for an operation
            on whole values.
        rules: signatures of the module's kind. A join has none. An operation that needs whole values of each rank's
            own samples has ``dp`` only, and no module.
        inputs: its inputs, each tensor once.
        units: number of equal pieces into which the features of the output may be cut.
        parts: number of results that follow each other along the output features, each of which is cut by itself.
        heads: number of heads of an attention; otherwise 1.
        after: work of the following operations outside of operators, in the layout that the operator hands on.
    """

    name: str
    module: str | None
    kind: Kind | None
    rules: Mapping[Signature, Rule]
    inputs: tuple[Edge, ...]
    output: Value
    units: int = 1
    parts: int = 1
    weights: tuple[Weight, ...] = ()
    heads: int = 1
    work: Work = Work()
    after: Work = Work()

    @property
    def is_join(self) -> bool:
        """Whether it is a join, which only brings its inputs into one layout."""
        return not self.rules


@dataclass(frozen=True)
class Loose:
    """Parameters that are used between operators.

    Attributes:
        module: path of the module that owns them.
        operator: index of the operator in whose output's layout they are used.
    """

    module: str
    weights: tuple[Weight, ...]
    operator: int


@dataclass(frozen=True)
class Graph:
    """The operators of a model in the order of the forward pass.

    Attributes:
        fingerprint: fingerprint of the model's parameters.
        operators: the operators; a module that is called twice has two, which must be split alike.
        outputs: indices of the operators whose results the model returns.
        loose: parameters that belong to no operator.
        notes: notes for users, for example on modules that cannot be split or on guessed edges.
    """

    fingerprint: str
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...]
    loose: tuple[Loose, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def consumers(self) -> tuple[tuple[tuple[int, Edge], ...], ...]:
        """For each operator, the consumers of its result: index and edge."""
        found: list[list[tuple[int, Edge]]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for edge in operator.inputs:
                if edge.source != INPUT:
                    found[edge.source].append((index, edge))
        return tuple(map(tuple, found))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters; tied ones count once."""
        weights = {weight.path: weight.bytes for operator in self.operators for weight in operator.weights}
        weights |= {weight.path: weight.bytes for loose in self.loose for weight in loose.weights}
        return sum(weights.values())
