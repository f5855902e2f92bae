"""Batched products and attention, with whole heads on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autosync.hybrid.execution.activation import Activation
from lightning_autosync.hybrid.execution.functions.elementwise import elementwise
from lightning_autosync.hybrid.execution.functions.operands import local_operand, unify
from lightning_autosync.hybrid.execution.layouts import Layout


def _product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    values = args[:2]
    layout = _batched(*values) if len(args) == 2 else None
    if layout is None:
        return NotImplemented
    parts = [local_operand(value, layout, value.shape, value) for value in values]
    return values[0].surroundings.wrap(func(*parts, **kwargs), layout)


def _attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    return _attend(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    layout = _batched(query, key, value)
    if layout is None or (enable_gqa and layout.by_features):
        return NotImplemented
    assert isinstance(query, Activation)
    around = query.surroundings
    mask = attn_mask
    if attn_mask is not None:
        scores = torch.Size((*query.shape[:-1], key.shape[-2]))
        mask = local_operand(attn_mask, layout, scores, query)
        if mask is None:
            return NotImplemented
    options: Any = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    options["enable_gqa"] = enable_gqa
    parts: Any = [local_operand(item, layout, item.shape, query) for item in (query, key, value)]
    with around.streams.shared(layout.states, dropout_p):
        found = F.scaled_dot_product_attention(*parts, **options)
    return around.wrap(found, layout)


def _batched(*values: Any) -> Layout | None:
    """The layout for products over the last two axes; None if one of these is cut or the values do not match."""
    first = values[0]
    if not all(isinstance(value, Activation) and value.dim() == first.dim() for value in values):
        return None
    layouts: list[Layout] = [value.placement for value in values]
    outer = first.dim() - 2
    cut = [layout for layout in layouts if layout.by_features]
    if any(value.shape[:outer] != first.shape[:outer] for value in values):
        return None
    if any(layout.rows != layouts[0].rows or layout.rows is None or layout.rows >= outer for layout in layouts):
        return None
    if any(layout.parts > 1 or layout.features >= outer or layout.features != cut[0].features for layout in cut):
        return None
    found = (cut or layouts)[0]
    return found.with_states(unify(layouts))


def _softmax(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value = args[0] if args else kwargs["input"]
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(value, Activation) or axis is None:
        return NotImplemented
    layout, axis = value.placement, axis % value.dim()
    if axis == layout.rows or (axis == layout.features and layout.by_features):
        return NotImplemented
    return elementwise(func, args, kwargs)


HANDLERS: dict[Any, Any] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _product),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(
        (F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax), _softmax
    ),
}
