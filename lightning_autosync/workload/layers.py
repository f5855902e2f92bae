"""The layers of the catalogue's models: follow the shape of one batch through a network, layer by layer.

Cost is counted in multiply-accumulates (MACs) of products alone. Norms, activations and pooling are free, as usual in
comparisons of models.
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
"""Backward needs two products, for the gradients of inputs and of weights, for each product of forward."""


@dataclass(frozen=True)
class Layer:
    """The variables of one layer, and the MACs of a batch's forward pass through it."""

    variables: tuple[Variable, ...]
    macs: int


class LayerTrace:
    """The shape of a batch of activations on its way through a network; records the layers in forward order.

    ``fork`` follows a branch or a shortcut.

    Attributes:
        batch_size: number of samples.
        channels: number of features at each position.
        size: positions of a sample: ``(height, width)`` of an image, ``(tokens,)`` of a text, ``()`` of a vector.
        layers: all layers recorded so far, including those of every fork.
    """

    def __init__(self, batch_size: int, channels: int, *size: int) -> None:
        self.batch_size = batch_size
        self.channels = channels
        self.size: tuple[int, ...] = size
        self.layers: list[Layer] = []

    @property
    def positions(self) -> int:
        """Number of positions in the whole batch."""
        return self.batch_size * math.prod(self.size)

    def fork(self) -> LayerTrace:
        """A branch that starts here and records into the same list of layers."""
        return copy.copy(self)

    def join(self, branches: Iterable[LayerTrace]) -> LayerTrace:
        """Continue with the concatenated channels of the branches."""
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
        """A 2-D convolution; the default padding keeps the size if the stride is 1."""
        kernel = _pair(kernel)
        self.pool(kernel, stride, (kernel[0] // 2, kernel[1] // 2) if padding is None else padding)
        weight = (channels, self.channels, *kernel)
        self._note(name, weight, channels if bias else None, self.positions * math.prod(weight))
        self.channels = channels
        return self

    def linear(self, name: str, channels: int, *, bias: bool = True, transposed: bool = False) -> LayerTrace:
        """A linear layer at every position; its weight is (out, in), or (in, out) if ``transposed``."""
        weight = (self.channels, channels) if transposed else (channels, self.channels)
        self._note(name, weight, channels if bias else None, self.positions * math.prod(weight))
        self.channels = channels
        return self

    def norm(self, name: str) -> LayerTrace:
        """A batch or layer normalization with scale and shift."""
        self._note(name, (self.channels,), self.channels, macs=0)
        return self

    def embedding(self, name: str, rows: int, rows_touched: float) -> LayerTrace:
        """A table of ``rows`` vectors with ``channels`` features, of which a step looks up ``rows_touched``."""
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
        """A product without variables of its own."""
        self.layers.append(Layer((), macs))
        return self

    def attention(self) -> LayerTrace:
        """The two products of attention: scores of all pairs of tokens, and the weighted sums."""
        return self.product(2 * self.positions * math.prod(self.size) * self.channels)

    def pool(self, kernel: Extent, stride: int = 1, padding: Extent = 0) -> LayerTrace:
        """A sliding window over an image.

        Raises:
            WorkloadError: no position is left.
        """
        self.size = tuple(
            (length + 2 * p - k) // stride + 1
            for length, k, p in zip(self.size, _pair(kernel), _pair(padding), strict=True)
        )
        if min(self.size) < 1:
            raise WorkloadError(f"resolution: too small, nothing is left after {len(self.layers)} layers")
        return self

    def flatten(self) -> LayerTrace:
        """Concatenate the features of all positions of a sample."""
        self.channels *= math.prod(self.size)
        return self.gather()

    def gather(self, *size: int) -> LayerTrace:
        """Pool to a given size, by default to one position."""
        self.size = size
        return self

    def workload(self, name: str, flops_per_second: float) -> Workload:
        """The workload of the recorded layers, at a sustained rate.

        A layer's gradients are ready when backward, which starts at the end of the network, has passed the layer.
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

    Real look-ups prefer a few rows, so this is about the largest number that a step touches.
    """
    return -rows * math.expm1(draws * math.log1p(-1 / rows)) if rows > 1 else min(draws, 1)


def _pair(extent: Extent) -> tuple[int, int]:
    return (extent, extent) if isinstance(extent, int) else extent
