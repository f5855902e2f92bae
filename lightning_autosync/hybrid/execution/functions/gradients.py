"""Gradients of a value, which code outside of layers sees in the home layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_autosync.hybrid.execution.activation import Activation, bring_home
from lightning_autosync.hybrid.execution.boxing import change_gradient


def _register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Let the hook see, and replace, the whole gradient of this rank's own samples."""
    value, hook = args
    # The hook belongs to the part and not to a converted copy, because all gradients of the value arrive at the part.
    layout, around = value.placement, value.surroundings
    around.record.note("hook", layout)

    def convert(gradient: Tensor) -> Tensor | None:
        home = layout.with_states(around.home_states)
        found = hook(change_gradient(gradient, home, layout.states, around.mesh))
        return None if found is None else change_gradient(found, layout, home.states, around.mesh)

    return func(value.local, convert)


def _retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    value = ref(args[0])  # the graph holds the hook, so a strong reference would keep both alive

    def keep(gradient: Tensor) -> None:
        kept = value()
        if kept is not None:
            kept.retained = gradient if kept.retained is None else kept.retained + gradient

    args[0].register_hook(keep)


def _retained(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
    found: Tensor | None = args[0].retained
    return found


def _gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle ``torch.autograd.grad``, whose second argument is a tuple by now."""
    outputs, inputs = args
    values = tuple(item.local if isinstance(item, Activation) else item for item in inputs)
    found = func(bring_home(outputs), values, **bring_home(dict(kwargs)))
    return tuple(map(_home_gradient, inputs, found))


def _home_gradient(value: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not isinstance(value, Activation):
        return gradient
    layout, around = value.placement, value.surroundings
    return change_gradient(gradient, layout.with_states(around.home_states), layout.states, around.mesh)


HANDLERS: dict[Any, Any] = {
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_grad,
    Tensor.grad.__get__: _retained,  # type: ignore[union-attr]
    torch.autograd.grad: _gradients,
}
