"""Metadata and gradients of a value, which code outside of layers sees as in the home layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_autosync.hybrid.execution.activation import Activation, bring_home
from lightning_autosync.hybrid.execution.boxing import change_gradient

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "itemsize", "is_cuda", "is_cpu", "is_sparse", "is_nested")
_METHODS = ["size", "dim", "numel", "nelement", "ndimension", "__len__", "is_floating_point", "is_complex"]
_METHODS += ["element_size", "is_contiguous", "stride", "get_device"]
_OF_LOCAL = ("requires_grad", "grad_fn", "is_leaf", "_version")


def _of_wrapper(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _of_local(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


def _unchanged(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    return args[0]


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
    **{getattr(Tensor, name).__get__: _of_wrapper for name in _PROPERTIES if hasattr(Tensor, name)},
    **{getattr(Tensor, name): _of_wrapper for name in _METHODS},
    **{getattr(Tensor, name).__get__: _of_local for name in _OF_LOCAL},
    torch.is_floating_point: _of_wrapper,
    torch.is_complex: _of_wrapper,
    torch.numel: _of_wrapper,
    Tensor.requires_grad_: _unchanged,
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_grad,
    Tensor.grad.__get__: _retained,  # type: ignore[union-attr]
    torch.autograd.grad: _gradients,
}
