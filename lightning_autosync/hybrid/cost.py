"""Costs of operators and of changes of layout between them: seconds and bytes of one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy
from numpy.typing import NDArray

from lightning_autosync.hybrid.conversions import States, local_size
from lightning_autosync.hybrid.graph import Operator, Value, Weight, Work
from lightning_autosync.hybrid.plan import Signature
from lightning_autosync.hybrid.pricing import Pricing

FORWARD, BACKWARD, BOXING_FORWARD, BOXING_BACKWARD, SYNCHRONIZATION, UPDATE, STATE, GRADIENTS, KEPT = range(9)
"""Indices in a vector of costs. Seconds: of forward and backward, of changes of layout in both passes, of summing
replicas' gradients, of the optimizer. Bytes: of parameters, optimizer state and message buffers (all of them
``STATE``); of gradients; of results that the backward pass needs."""
COSTS = 9

Costs = NDArray[numpy.float64]
"""Costs as arrays [..., COSTS]."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step besides the model.

    Attributes:
        slots: numbers that the optimizer keeps per parameter element; 2 for Adam.
        overlap: whether the synchronization of gradients overlaps with the backward pass.
    """

    slots: float = 2.0
    overlap: bool = True


def step_seconds(costs: Costs, overlap: bool = True) -> NDArray[numpy.float64]:
    """[...] seconds of a step. Changes of layout never overlap; with ``overlap``, gradients overlap with backward."""
    backward, summing = costs[..., BACKWARD], costs[..., SYNCHRONIZATION]
    together = numpy.maximum(backward, summing) if overlap else backward + summing
    return (
        costs[..., FORWARD] + costs[..., BOXING_FORWARD] + costs[..., BOXING_BACKWARD] + costs[..., UPDATE] + together
    )


def memory_bytes(costs: Costs) -> NDArray[numpy.float64]:
    """[...] bytes that suffice for a rank: gradients and results that backward needs as if all were there at once.

    `lightning_autosync.hybrid.prediction` follows them through the step, and so finds less.
    """
    return costs[..., STATE] + costs[..., GRADIENTS] + costs[..., KEPT]


def legal_signatures(operator: Operator, mesh: Sequence[int]) -> list[tuple[Signature, ...]]:
    """The signatures that an operator's sizes allow."""
    found = product(operator.rules, repeat=len(mesh))
    return [signature for signature in found if _fits(operator, signature, mesh)]


def _fits(operator: Operator, signature: Sequence[Signature], mesh: Sequence[int]) -> bool:
    # The same conditions as in `signatures.refusal`, which also reports reasons.
    column = operator.rules["col"].axes if "col" in operator.rules else {}
    for weight in operator.weights:
        for axis, extent in enumerate(weight.shape):
            pieces = _pieces(operator, signature, mesh, weight.name, axis)
            parts = operator.parts if column.get(weight.name) == axis else 1
            if pieces > 1 and (weight.outside or extent % (pieces * parts)):
                return False
    heads = math.prod(size for name, size in zip(signature, mesh, strict=True) if name == "heads")
    return operator.heads % heads == 0


def _pieces(
    operator: Operator, signature: Sequence[Signature], mesh: Sequence[int], weight: str, axis: int | None = None
) -> int:
    """The number of pieces into which a weight is cut, along one axis or, if ``axis`` is None, along all axes."""
    cut = 1
    for name, size in zip(signature, mesh, strict=True):
        axes = operator.rules[name].axes
        if weight in axes and axis in (None, axes[weight]):
            cut *= size
    return cut


def makes(operator: Operator, signature: Sequence[Signature]) -> States:
    """The states in which an operator makes its output."""
    return tuple(operator.rules[name].result for name in signature)


def takes(operator: Operator, signature: Sequence[Signature]) -> States:
    """The states in which an operator takes its input."""
    return tuple(operator.rules[name].taken for name in signature)


def summed(
    operator: Operator, weights: Iterable[Weight], signature: Sequence[Signature], mesh: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """Bytes of gradients on one rank, by the dimensions of the mesh along which they are summed."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    replicas = tuple(dimension for dimension, name in enumerate(signature) if name == "dp")
    for weight in weights:
        if weight.trainable:
            everywhere = tuple(range(len(mesh)))
            size = weight.bytes / _pieces(operator, signature, mesh, weight.name)
            found[everywhere if weight.outside else replicas] += size
    return found


def local_bytes(
    operator: Operator, weights: Iterable[Weight], signature: Sequence[Signature], mesh: Sequence[int]
) -> float:
    """Bytes of some weights on one rank."""
    return sum(weight.bytes / _pieces(operator, signature, mesh, weight.name) for weight in weights)


class LayerCosts:
    """Costs of operators on one mesh."""

    def __init__(self, pricing: Pricing, settings: StepSettings) -> None:
        self.pricing = pricing
        self.settings = settings

    def layer(self, operator: Operator, signature: tuple[Signature, ...], own: Sequence[Weight]) -> Costs:
        """The costs of an operator itself.

        Args:
            own: its weights, without shared ones that count for another operator.
        """
        costs = numpy.zeros(COSTS)
        if operator.module is None:
            return costs
        rates, mesh, crowd = self.pricing.rates, self.pricing.mesh, self.pricing.crowd
        scale = self._scale(operator, signature)
        total = sum(weight.bytes for weight in operator.weights)
        read = local_bytes(operator, operator.weights, signature, mesh)
        moved = max(0.0, operator.work.moved - total) * scale + read
        work = Work(operator.work.flops * scale, moved, operator.work.calls)
        costs[FORWARD] = self._seconds(work) + rates.layer * crowd / 2
        costs[BACKWARD] = 2 * self._seconds(work) + rates.layer * crowd / 2
        held = local_bytes(operator, own, signature, mesh)
        trained = local_bytes(operator, [weight for weight in own if weight.trainable], signature, mesh)
        sums = {dims: size for dims, size in summed(operator, own, signature, mesh).items() if _ranks(mesh, dims) > 1}
        costs[SYNCHRONIZATION] = sum(self.pricing.gradients(dimensions, size) for dimensions, size in sums.items())
        costs[UPDATE] = trained / rates.update * crowd
        costs[STATE] = held + trained * self.settings.slots + sum(sums.values())
        costs[GRADIENTS] = trained
        given = sum({edge.tensor: edge.value.bytes for edge in operator.inputs}.values())
        kept = min(float(given), operator.work.kept)
        sampled = _has_samples(operator.inputs[0].value) if operator.inputs else False
        costs[KEPT] = kept * local_size(takes(operator, signature), mesh, sampled) + (operator.work.kept - kept) * scale
        return costs

    def loose(self, weights: Iterable[Weight]) -> Costs:
        """The costs of parameters that belong to no operator."""
        costs, everywhere = numpy.zeros(COSTS), tuple(range(len(self.pricing.mesh)))
        for weight in weights:
            trained = weight.bytes if weight.trainable else 0
            costs[SYNCHRONIZATION] += self.pricing.gradients(everywhere, trained)
            costs[UPDATE] += trained / self.pricing.rates.update * self.pricing.crowd
            costs[STATE] += weight.bytes + trained * (self.settings.slots + (_ranks(self.pricing.mesh, everywhere) > 1))
            costs[GRADIENTS] += trained
        return costs

    def after(self, operator: Operator, handed: States) -> Costs:
        """The costs of the work after an operator, in the layout that the operator hands on."""
        scale = local_size(handed, self.pricing.mesh, _has_samples(operator.output))
        work = operator.after
        costs = numpy.zeros(COSTS)
        costs[FORWARD] = self._seconds(Work(work.flops * scale, work.moved * scale, work.calls))
        costs[BACKWARD] = 2 * costs[FORWARD]
        costs[KEPT] = work.kept * scale
        return costs

    def change(self, value: Value, sources: tuple[States, ...], goals: tuple[States, ...]) -> Costs:
        """[sources, goals, COSTS] costs of changes of a value's layout."""
        seconds = self.pricing.changes(sources, goals, _has_samples(value))
        costs = numpy.zeros((len(sources), len(goals), COSTS))
        costs[..., BOXING_FORWARD] = seconds.forward * value.bytes + seconds.forward_calls
        if value.differentiable:
            costs[..., BOXING_BACKWARD] = seconds.backward * value.bytes + seconds.backward_calls
        return costs

    def _scale(self, operator: Operator, signature: Sequence[Signature]) -> float:
        """Work of one rank relative to the unsplit operator on the rank's own samples."""
        sampled, scale = _has_samples(operator.output), 1.0
        for name, size in zip(signature, self.pricing.mesh, strict=True):
            if sampled and name == "rep":
                scale *= size
            if not sampled and operator.rules[name].axes:
                scale /= size
        return scale

    def _seconds(self, work: Work) -> float:
        rates = self.pricing.rates
        seconds = work.flops / rates.flops + work.moved / rates.memory + work.calls * rates.operation
        return seconds * self.pricing.crowd


def _ranks(mesh: Sequence[int], dimensions: Sequence[int]) -> int:
    return math.prod(mesh[dimension] for dimension in dimensions)


def _has_samples(value: Value) -> bool:
    return value.batch_axis is not None
