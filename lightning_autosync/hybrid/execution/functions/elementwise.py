"""Element-wise functions of one or more operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_autosync.hybrid.execution.activation import Activation, run_at_home
from lightning_autosync.hybrid.execution.functions.operands import common_layout, local_operand


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    """
    abs absolute add addcdiv addcmul atan bfloat16 bitwise_and bitwise_not bitwise_or ceil celu clamp
    clamp_max clamp_min clone contiguous cos detach div divide double elu eq erf exp expm1 float floor
    ge gelu greater gt half hardsigmoid hardswish hardtanh int isfinite isinf isnan le leaky_relu lerp
    less log log1p log2 logaddexp logical_and logical_not logical_or logsigmoid long lt masked_fill
    maximum minimum mish mul multiply nan_to_num ne neg negative ones_like pow reciprocal relu relu6
    round rsqrt rsub selu sigmoid sign silu sin softplus softsign sqrt square sub subtract tanh
    threshold to true_divide type_as where xlogy zeros_like empty_like full_like bool __add__ __radd__
    __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ __neg__
    __abs__ __invert__ __and__ __or__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    """
)
_DROPOUT_NAMES = _words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout")
_BY_ELEMENT = ("dropout", "alpha_dropout")
"""Names of the functions that drop each element by itself; the others drop all of a channel, the second axis."""
_PLACES = (torch, F, Tensor)


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Compute on a rank's part, in a common layout of the operands."""
    if kwargs.get("out") is not None:
        return NotImplemented  # the part of ``out`` may be a copy
    leaves, structure = tree_flatten((args, dict(kwargs)))
    values = [leaf for leaf in leaves if isinstance(leaf, Activation)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        return NotImplemented
    found = common_layout(values)
    if found is None or found[1] != shape:
        return NotImplemented
    layout = found[0]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[index] = local_operand(leaf, layout, shape, values[0])
            if leaves[index] is None:
                return NotImplemented
    local_args, local_kwargs = tree_unflatten(leaves, structure)
    return values[0].surroundings.wrap(func(*local_args, **local_kwargs), layout)


def _elementwise_no_change(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle functions with an argument ``inplace``: compute out of place, then let the argument become the result."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    changes, bound.arguments["inplace"] = bound.arguments["inplace"], False
    handler: Any = _dropout if func.__name__ in _DROPOUT_NAMES else run_at_home if func is F.rrelu else elementwise
    found = handler(func, bound.args, bound.kwargs)
    if changes and found is not NotImplemented:
        return args[0].become(found)
    return found


def _where(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle ``torch.where``; with a condition only it returns indices, whose number depends on the values."""
    return NotImplemented if len(args) + len(kwargs) == 1 else elementwise(func, args, kwargs)


def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle dropout: draws agree on ranks with the same values and differ between others.

    Other random functions are not handled: at home they draw as in the unsplit model.
    """
    given = {**dict(zip(("value", "p", "train"), args, strict=False)), **kwargs}
    value, layout = args[0], args[0].placement
    if func.__name__ not in _BY_ELEMENT and layout.by_features and layout.features > 1:
        return NotImplemented  # it drops whole channels, of which ranks have parts
    with value.surroundings.streams.shared(layout.states, given["p"] if given["train"] else 0.0):
        return elementwise(func, args, kwargs)


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func, follow_wrapped=False)


def _changing(plain: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of an in-place function, made from the handler of its out-of-place form."""

    def change(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if not isinstance(args[0], Activation):
            return NotImplemented
        found = handler(plain, args, kwargs)
        return found if found is NotImplemented else args[0].become(found)

    return change


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = {}
    for names, handler in ((_NAMES, elementwise), (_DROPOUT_NAMES, _dropout)):
        for name in names:
            for place in _PLACES:
                func = getattr(place, name, None)
                if func is None:
                    continue
                by_name = inspect.isfunction(func) and "inplace" in _signature(func).parameters
                handlers[func] = _elementwise_no_change if by_name else handler
                own = f"__i{name[2:]}" if name.startswith("__") else f"{name}_"
                changing = getattr(place, own, None)
                if changing is not None and not (name.startswith("__") and name[2] == "r"):
                    handlers[changing] = _changing(func, handlers[func])
    return {**handlers, torch.where: _where, F.rrelu: _elementwise_no_change}


HANDLERS = _handlers()
