"""`GradientScale`: multiplies the gradients of this rank before autograd accumulates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle


class GradientScale:
    """Multiplies each gradient by a weight, before it is added to ``parameter.grad``.

    Accumulated micro-batches may therefore have different weights. Hooks that users register on parameters see
    gradients without the weight. A weight of 1 costs nothing but the call.

    Args:
        weight: returns the weight of the present backward pass. It is called for each gradient.
    """

    def __init__(self, weight: Callable[[], float]) -> None:
        self._weight = weight
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        self._arrived: set[nn.Parameter] = set()

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Scale the gradients of these parameters from now on, and of no others."""
        self.close()
        for parameter in parameters:
            node = gradient_accumulator(parameter)
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._scale))
            self._handles.append(node.register_hook(partial(self._note, parameter)))

    def close(self) -> None:
        """Scale no gradients any more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

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


def gradient_accumulator(parameter: nn.Parameter) -> Node:
    """The autograd node that accumulates the gradient of a parameter. It lives as long as somebody refers to it."""
    trains = parameter.requires_grad
    with torch.enable_grad():
        # Only views of trainable parameters lead to the node. A frozen parameter has the same one when it trains again.
        function = parameter.requires_grad_().view_as(parameter).grad_fn
    parameter.requires_grad_(trains)
    assert function is not None
    accumulator = function.next_functions[0][0]
    assert accumulator is not None
    return accumulator
