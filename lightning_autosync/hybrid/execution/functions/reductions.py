"""Functions over axes that are not cut: pooling over image positions, means and sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_POOLS = [f"{kind}_pool{axes}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp") for axes in (1, 2, 3)]


def _pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value = args[0]
    layout = value.placement
    if kwargs.get("return_indices") or layout.rows != 0 or (layout.by_features and layout.features != 1):
        return NotImplemented
    if value.dim() < 3:
        return NotImplemented
    return value.surroundings.wrap(func(value.local, *args[1:], **kwargs), layout)


def _reduce(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value = args[0]
    axes = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if axes is None or isinstance(axes, torch.dtype):
        return NotImplemented
    gone = sorted({axis % value.dim() for axis in ([axes] if isinstance(axes, int) else axes)})
    layout = value.placement
    if not gone or layout.rows in gone or (layout.by_features and layout.features in gone):
        return NotImplemented
    found = func(value.local, *args[1:], **kwargs)
    if found.dim() != value.dim():
        rows = None if layout.rows is None else layout.rows - sum(axis < layout.rows for axis in gone)
        features = layout.features - sum(axis < layout.features for axis in gone) if layout.by_features else 0
        layout = replace(layout, rows=rows, features=features)
    return value.surroundings.wrap(found, layout)


HANDLERS: dict[Any, Any] = {
    **{getattr(place, name): _pool for name in _POOLS for place in (torch, F) if hasattr(place, name)},
    **dict.fromkeys((torch.mean, Tensor.mean, torch.sum, Tensor.sum), _reduce),
}
