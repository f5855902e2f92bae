"""Metadata of a value, such as its shape, as in the home layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


HANDLERS: dict[Any, Any] = {
    **{getattr(Tensor, name).__get__: _of_wrapper for name in _PROPERTIES if hasattr(Tensor, name)},
    **{getattr(Tensor, name): _of_wrapper for name in _METHODS},
    **{getattr(Tensor, name).__get__: _of_local for name in _OF_LOCAL},
    torch.is_floating_point: _of_wrapper,
    torch.is_complex: _of_wrapper,
    torch.numel: _of_wrapper,
    Tensor.requires_grad_: _unchanged,
}
