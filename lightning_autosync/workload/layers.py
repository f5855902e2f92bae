"""The layer vocabulary of the catalogue: follow one batch's shape through a network, layer by layer.

Cost is counted in multiply-accumulates (MACs) of the products alone; norms, activations and pooling
are free, as is usual when models are compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.spec import Variable, Workload, is_row_sparse

Extent = int | tuple[int, int]

FLOPS_PER_MAC = 2
BACKWARD_PER_FORWARD = 2
"""Backward makes two products, for the gradients of inputs and of weights, where forward makes one."""


@dataclass(frozen=True)
class Layer:
    """What one layer holds, and the MACs of a batch's forward pass through it."""

    variables: tuple[Variable, ...]
    macs: int


class LayerTrace:
    """The shape of a batch of activations on its way through a network.

    Every layer that it passes is noted, in forward order. ``fork`` follows a branch or a shortcut.

    Attributes:
        batch_size: samples.
        channels: features at each position.
        size: positions of a sample: ``(height, width)`` of an image, ``(tokens,)`` of a text, ``()`` of
            a vector.
        layers: all layers noted so far, those of every fork included.
    """

    def __init__(self, batch_size: int, channels: int, *size: int) -> None:
        self.batch_size = batch_size
        self.channels = channels
        self.size: tuple[int, ...] = size
        self.layers: list[Layer] = []

    @property
    def positions(self) -> int:
        """Positions of the whole batch."""
        return self.batch_size * math.prod(self.size)

    def fork(self) -> LayerTrace:
        """A branch that goes on from here."""
        return copy.copy(self)

    def join(self, branches: Iterable[LayerTrace]) -> LayerTrace:
        """Go on with the branches' channels side by side."""
        branches = list(branches)
        self.size = branches[0].size
        self.channels = sum(branch.channels for branch in branches)
        return self

    def conv(
        self,
        name: str,
        channels: int,
        kernel: Extent,
        *,
        stride: int = 1,
        padding: Extent | None = None,
        bias: bool = False,
    ) -> LayerTrace:
        """A 2-D convolution; by default padded so that a stride of one keeps the size."""
        kernel = _pair(kernel)
        self.pool(kernel, stride, (kernel[0] // 2, kernel[1] // 2) if padding is None else padding)
        weight = (channels, self.channels, *kernel)
        self._note(name, weight, channels if bias else None, self.positions * math.prod(weight))
        self.channels = channels
        return self

    def linear(self, name: str, channels: int, *, bias: bool = True, transposed: bool = False) -> LayerTrace:
        """A product at every position; its weight is (out, in), or (in, out) if ``transposed``."""
        weight = (self.channels, channels) if transposed else (channels, self.channels)
        self._note(name, weight, channels if bias else None, self.positions * math.prod(weight))
        self.channels = channels
        return self

    def norm(self, name: str) -> LayerTrace:
        """A batch or layer normalization with scale and shift."""
        self._note(name, (self.channels,), self.channels, macs=0)
        return self

    def embedding(self, name: str, rows: int, rows_touched: float) -> LayerTrace:
        """A table of ``rows`` vectors of this flow's width, of which a step looks up ``rows_touched``."""
        sparse = is_row_sparse(rows_touched, rows)
        table = Variable(
            name=f"{name}.weight",
            shape=(rows, self.channels),
            kind="row_sparse" if sparse else "dense",
            rows=rows_touched if sparse else None,
        )
        self.layers.append(Layer((table,), macs=0))
        return self

    def product(self, macs: int) -> LayerTrace:
        """A product that has no variable of its own."""
        self.layers.append(Layer((), macs))
        return self

    def attention(self) -> LayerTrace:
        """Scores of every token with every token, and their weighted sums."""
        return self.product(2 * self.positions * math.prod(self.size) * self.channels)

    def pool(self, kernel: Extent, stride: int = 1, padding: Extent = 0) -> LayerTrace:
        """A window sliding over an image."""
        self.size = tuple(
            (length + 2 * p - k) // stride + 1
            for length, k, p in zip(self.size, _pair(kernel), _pair(padding), strict=True)
        )
        if min(self.size) < 1:
            raise WorkloadError(f"resolution: too small, nothing is left after {len(self.layers)} layers")
        return self

    def flatten(self) -> LayerTrace:
        """All positions of a sample side by side."""
        self.channels *= math.prod(self.size)
        return self.gather()

    def gather(self, *size: int) -> LayerTrace:
        """Pool to a given size; to one position by default."""
        self.size = size
        return self

    def workload(self, name: str, flops_per_second: float) -> Workload:
        """The workload of the layers passed, at a sustained computing rate.

        A layer's gradients are ready once backward has gone from the end of the network through it.
        """
        forward = [FLOPS_PER_MAC * layer.macs / flops_per_second for layer in self.layers]
        ready = list(accumulate(BACKWARD_PER_FORWARD * time for time in reversed(forward)))
        variables = tuple(
            variable.model_copy(update={"ready": time})
            for layer, time in zip(self.layers, reversed(ready), strict=True)
            for variable in layer.variables
        )
        return Workload(name=name, variables=variables, forward_time=sum(forward), backward_time=ready[-1])

    def _note(self, name: str, weight: tuple[int, ...], bias: int | None, macs: int) -> None:
        variables = [Variable(name=f"{name}.weight", shape=weight)]
        if bias is not None:
            variables.append(Variable(name=f"{name}.bias", shape=(bias,)))
        self.layers.append(Layer(tuple(variables), macs))


def distinct(draws: int, rows: int) -> float:
    """Expected number of distinct rows among ``draws`` uniform draws with replacement.

    Real look-ups favour few rows, so that this is about the most that a step touches.
    """
    return -rows * math.expm1(draws * math.log1p(-1 / rows)) if rows > 1 else min(draws, 1)


def _pair(extent: Extent) -> tuple[int, int]:
    return (extent, extent) if isinstance(extent, int) else extent
