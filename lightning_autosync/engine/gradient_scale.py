"""`GradientScale`: multiplies the gradients of this rank before autograd accumulates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_autosync.engine.accumulator_hooks import AccumulatorHooks


class GradientScale:
    """Multiplies each gradient by a weight, before it is added to ``parameter.grad``.

    Accumulated micro-batches may therefore have different weights. Hooks that users register on parameters see
    gradients without the weight. A weight of 1 costs nothing but the call.

    Args:
        weight: returns the weight of the present backward pass. It is called for each gradient.
    """

    def __init__(self, weight: Callable[[], float]) -> None:
        self._weight = weight
        self._hooks = AccumulatorHooks()
        self._arrived: set[nn.Parameter] = set()

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Scale the gradients of these parameters from now on, and of no others."""
        self.close()
        for parameter in parameters:
            self._hooks.add(parameter, partial(self._note, parameter), self._scale)

    def close(self) -> None:
        """Scale no gradients any more."""
        self._hooks.remove()

    def begin(self) -> None:
        """Begin a backward pass, for `arrived`."""
        self._arrived.clear()

    def arrived(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient of the parameter has been accumulated since `begin`."""
        return parameter in self._arrived

    def _scale(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        weight = self._weight()
        if weight == 1.0 or gradients[0] is None:
            return None
        if weight == 0.0:  # of a gradient that may be infinite
            return (torch.zeros_like(gradients[0]),)
        return (gradients[0] * weight,)

    def _note(self, parameter: nn.Parameter, *_: object) -> None:
        self._arrived.add(parameter)
