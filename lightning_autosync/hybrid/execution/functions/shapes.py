"""Functions that change the shape of a value, take a part of it, or reduce axes that are not cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autosync.hybrid.execution.activation import Activation
from lightning_autosync.hybrid.execution.layouts import Layout, local_shape


def _reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value, *rest = args
    if any(isinstance(item, torch.dtype) for item in rest):
        return NotImplemented
    rest = [torch.empty(item.shape, device="meta") if isinstance(item, Tensor) else item for item in rest]
    try:
        shape = func(torch.empty(value.shape, device="meta"), *rest, **kwargs).shape
    except RuntimeError:
        return NotImplemented
    sizes = value.surroundings.mesh.sizes
    layout = reshaped(value.shape, shape, value.placement, sizes)
    if layout is None:
        return NotImplemented
    return value.surroundings.wrap(value.local.reshape(local_shape(shape, layout, sizes)), layout)


def reshaped(before: Sequence[int], after: Sequence[int], layout: Layout, sizes: Sequence[int]) -> Layout | None:
    """The layout of a value after a reshape; None if elements would have to move between ranks.

    If axes are merged, an axis that is cut must be the first of them. If an axis that is cut is divided, the cut goes
    to the first of the new axes.
    """
    ranks = prod(sizes[k] for k in layout.by_features)
    rows, features, parts = layout.rows, layout.features, layout.parts
    for old, new in _blocks(before, after):
        has_rows = rows is not None and layout.rows in old
        has_features = ranks > 1 and layout.features in old
        if not (has_rows or has_features):
            continue
        if (has_rows and has_features) or not new:
            return None
        axis = layout.rows if has_rows else layout.features
        assert axis is not None
        if any(before[other] != 1 for other in old if other < axis):
            return None
        first = next((place for place in new if after[place] != 1), new[0])
        if has_rows:
            rows = first
        elif parts > 1 and after[first] == parts and first + 1 in new and after[first + 1] % ranks == 0:
            features, parts = first + 1, 1
        elif after[first] % (parts * ranks) == 0:
            features = first
        else:
            return None
    return replace(layout, rows=rows, features=features if ranks > 1 else 0, parts=parts)


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of adjacent axes, before and after a reshape, that contain the same elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        if i < len(before):
            old.append(i)
            left = before[i]
            i += 1
        if j < len(after) and (left != 1 or not old or after[j] == 1):
            new.append(j)
            right = after[j]
            j += 1
        while left != right:
            if left < right:
                left *= before[i]
                old.append(i)
                i += 1
            else:
                right *= after[j]
                new.append(j)
                j += 1
        found.append((old, new))
    return found


def _permute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value = args[0]
    # Derive the order of the axes from the strides of a tensor with sizes 2, in which every axis has its own stride.
    strides = func(torch.empty([2] * value.dim(), device="meta"), *args[1:], **kwargs).stride()
    order = [value.dim() - 1 - (stride.bit_length() - 1) for stride in strides]
    rows = None if value.placement.rows is None else order.index(value.placement.rows)
    layout = replace(value.placement, rows=rows, features=order.index(value.placement.features))
    return value.surroundings.wrap(func(value.local, *args[1:], **kwargs), layout)


def _split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value = args[0]
    layout, around = value.placement, value.surroundings
    axis = kwargs["dim"] if "dim" in kwargs else (args[-1] if len(args) > 2 else 0)
    axis %= value.dim()
    if axis == layout.rows:
        return NotImplemented
    if axis != layout.features or not layout.by_features:
        return tuple(around.wrap(piece, layout) for piece in func(value.local, *args[1:], **kwargs))
    pieces = [piece.shape[axis] for piece in func(torch.empty(value.shape, device="meta"), *args[1:], **kwargs)]
    part = value.shape[axis] // layout.parts
    if any(piece % part for piece in pieces):
        return NotImplemented
    own = value.local.shape[axis] // layout.parts
    cut = value.local.split([piece // part * own for piece in pieces], axis)
    return tuple(
        around.wrap(tensor, replace(layout, parts=piece // part)) for tensor, piece in zip(cut, pieces, strict=True)
    )


def _unbind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    value = args[0]
    axis = kwargs.get("dim", args[1] if len(args) > 1 else 0) % value.dim()
    return tuple(value[(slice(None),) * axis + (index,)] for index in range(value.shape[axis]))


def _take(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """``value[...]``, if the index leaves the axis of samples and cut axes whole."""
    value, index = args
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in index):
        return NotImplemented
    if any(isinstance(item, bool) for item in index):
        return NotImplemented
    named = sum(item is not None and item is not Ellipsis for item in index)
    rest = (slice(None),) * (value.dim() - named)
    place = next((at for at, item in enumerate(index) if item is Ellipsis), len(index))
    items = [*index[:place], *rest, *index[place + 1 :]]
    layout, axis, at = value.placement, 0, 0
    rows, features = layout.rows, layout.features
    for number, item in enumerate(items):
        if item is None:
            at += 1
            continue
        if axis == layout.rows or (axis == layout.features and layout.by_features):
            if not isinstance(item, slice) or item.indices(value.shape[axis]) != (0, value.shape[axis], 1):
                return NotImplemented
            items[number] = slice(None)
        if axis == layout.rows:
            rows = at
        if axis == layout.features:
            features = at
        axis += 1
        at += isinstance(item, slice)
    taken = replace(layout, rows=rows, features=features if layout.by_features else 0)
    return value.surroundings.wrap(value.local[tuple(items)], taken)


def _concatenate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    # torch.cat ignores empty vectors, which some code uses as an initial value.
    values = [tensor for tensor in tensors if isinstance(tensor, Activation) or tensor.dim() != 1 or tensor.numel()]
    if not all(isinstance(value, Activation) for value in values):
        return NotImplemented
    first = values[0]
    layout, axis = first.placement, axis % first.dim()
    if any(value.placement != layout or value.dim() != first.dim() for value in values):
        return NotImplemented
    if len(values) > 1 and (axis == layout.rows or (axis == layout.features and layout.by_features)):
        return NotImplemented
    return first.surroundings.wrap(torch.cat([value.local for value in values], axis), layout)


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


def _named(*names: str) -> list[Any]:
    return [getattr(place, name) for name in names for place in (torch, Tensor) if hasattr(place, name)]


HANDLERS: dict[Any, Any] = {
    **dict.fromkeys(
        _named("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), _reshape
    ),
    **dict.fromkeys(
        _named("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint"), _permute
    ),
    Tensor.mT.__get__: _permute,  # type: ignore[attr-defined]
    Tensor.T.__get__: _permute,  # type: ignore[attr-defined]
    **dict.fromkeys(_named("split", "chunk", "tensor_split", "split_with_sizes"), _split),
    **dict.fromkeys(_named("unbind"), _unbind),
    Tensor.__getitem__: _take,
    torch.cat: _concatenate,
    torch.concat: _concatenate,
    **{getattr(place, name): _pool for name in _POOLS for place in (torch, F) if hasattr(place, name)},
    **dict.fromkeys((torch.mean, Tensor.mean, torch.sum, Tensor.sum), _reduce),
}
