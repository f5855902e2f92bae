"""`AccumulatorHooks`: hooks on the autograd nodes that accumulate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle


class AccumulatorHooks:
    """Hooks on the nodes of some parameters, which are removed together.

    They run after the user's hooks on the parameters, in whatever order hooks were registered.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []

    def add(self, parameter: nn.Parameter, hook: Callable[..., None], before: Callable[..., Any] | None = None) -> None:
        """Call ``before`` with each gradient before it is accumulated, and ``hook`` when it is."""
        node = gradient_accumulator(parameter)
        self._nodes.append(node)
        if before is not None:
            self._handles.append(node.register_prehook(before))
        self._handles.append(node.register_hook(hook))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []


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
