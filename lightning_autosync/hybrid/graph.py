"""`Graph`: the operators of a model, what they cost, and how tensors flow between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightning_autosync.hybrid.plan import Signature
from lightning_autosync.hybrid.signatures import Kind, Rule

INPUT = -1
"""The source of what is the model's input."""


@dataclass(frozen=True)
class Work:
    """What is done in a forward pass over the batch of one rank, before anything is split.

    Attributes:
        flops: floating-point operations of products of matrices and convolutions.
        moved: bytes that operations read and write.
        calls: how many operations there are.
        kept: bytes of the results that the backward pass needs.
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
        shape: whole.
        itemsize: bytes of an element.
        batch_axis: the axis of samples; None where it has none.
        differentiable: whether a gradient comes back.
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
    """What an operator takes.

    Attributes:
        source: index of the operator that it comes from, or `INPUT`.
        value: as it arrives.
        units: into how many equal pieces its features may be cut all the way from the source; 1 where not at all.
        tensor: names the tensor, which several operators may take.
    """

    source: int
    value: Value
    units: int = 1
    tensor: str = ""


@dataclass(frozen=True)
class Weight:
    """A parameter of an operator.

    Attributes:
        name: in its module.
        path: in ``named_parameters()``; a tied one has the same path wherever it is used.
        shape: whole.
        itemsize: bytes of an element.
        trainable: whether it has a gradient.
        outside: whether a module has it that is no operator: then it is whole on each rank, and its gradient may have
            summands of all ranks.
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
    """A module that may be split, or a place where results of several meet (``module`` is None).

    Attributes:
        name: the module's path, or where the results meet.
        module: the module's path; None of a meeting, whose inputs and output share one layout.
        kind: of the module.
        rules: the signatures of the module's kind. A meeting has none; an operation that gets values whole, each rank
            its own samples', has ``dp`` and no module.
        inputs: what it takes, each tensor once.
        output: what it makes.
        units: into how many equal pieces the features of the output may be cut.
        parts: how many results the output features hold one after the other, each cut by itself.
        weights: its parameters.
        heads: of an attention; 1 elsewhere.
        work: its own.
        after: the work of what follows it and has no module of its own, done in the layout that it hands on.
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
    def meets(self) -> bool:
        """Whether it is a place where results meet."""
        return not self.rules


@dataclass(frozen=True)
class Loose:
    """Parameters that are used between operators.

    Attributes:
        module: path of the module that has them.
        weights: the parameters.
        operator: index of the operator in whose output's layout they are used.
    """

    module: str
    weights: tuple[Weight, ...]
    operator: int


@dataclass(frozen=True)
class Graph:
    """The operators of a model in the order of the forward pass.

    Attributes:
        fingerprint: of the model's parameters.
        batch: samples of one rank for which sizes are given.
        operators: a module that is called twice has two, which must be split alike.
        outputs: indices of the operators whose results the model returns.
        loose: parameters that no operator has.
        notes: what a user should know, a line each: modules that cannot be split, edges that are guessed.
    """

    fingerprint: str
    batch: int
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...]
    loose: tuple[Loose, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def consumers(self) -> tuple[tuple[tuple[int, Edge], ...], ...]:
        """For each operator, who takes its result: index and edge."""
        found: list[list[tuple[int, Edge]]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for edge in operator.inputs:
                if edge.source != INPUT:
                    found[edge.source].append((index, edge))
        return tuple(map(tuple, found))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, a tied one once."""
        weights = {weight.path: weight.bytes for operator in self.operators for weight in operator.weights}
        weights |= {weight.path: weight.bytes for loose in self.loose for weight in loose.weights}
        return sum(weights.values())
