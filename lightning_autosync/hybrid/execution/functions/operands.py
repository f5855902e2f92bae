"""Converts several operands of a function to a common layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_autosync.hybrid.execution.activation import Activation
from lightning_autosync.hybrid.execution.layouts import Layout, State


def common_layout(values: Sequence[Activation]) -> tuple[Layout, torch.Size] | None:
    """The layout and the home shape of an element-wise function's result; None if there is no common layout."""
    shape = torch.broadcast_shapes(*(value.shape for value in values))
    first = max(values, key=lambda value: (value.placement.rows is not None, value.dim()))
    found = first.placement
    cut = [value for value in values if value.placement.by_features]
    if cut:
        found = replace(found, features=_from_right(cut[0], len(shape)), parts=cut[0].placement.parts)
    states = unify([value.placement for value in values])
    if first.dim() != len(shape) or (found.rows is not None and first.shape[found.rows] != shape[found.rows]):
        return None
    for value in values:
        own = value.placement
        if own.rows is not None and (value.dim() != len(shape) or own.rows != found.rows):
            return None
        if own.rows is not None and value.shape[own.rows] != shape[own.rows]:
            return None
        if own.by_features and (_from_right(value, len(shape)) != found.features or own.parts != found.parts):
            return None
        if "features" in states and not own.by_features and not _reaches(value, found.features, shape):
            return None
    if "features" in states and shape[found.features] != cut[0].shape[cut[0].placement.features]:
        return None
    return found.with_states(states), shape


def unify(layouts: Sequence[Layout]) -> tuple[State, ...]:
    """States to which all layouts can be converted; where they differ, the state with the least computation."""
    found: list[State] = []
    for states in zip(*(layout.states for layout in layouts), strict=True):
        found.append(states[0] if len(set(states)) == 1 else "batch" if "batch" in states else "features")
    return tuple(found)


def _from_right(value: Activation, dimensions: int) -> int:
    return value.placement.features + dimensions - value.dim()


def _reaches(value: Tensor, axis: int, shape: torch.Size) -> bool:
    """Whether a value, aligned at the last axis, has the full size along an axis of the common shape."""
    own = axis - (len(shape) - value.dim())
    return own >= 0 and value.shape[own] == shape[axis]


def local_operand(value: Tensor, layout: Layout, shape: torch.Size, around: Activation) -> Tensor | None:
    """A rank's part of an operand, for a function that computes in ``layout``; None if it must use the home layout.

    Args:
        value: an activation or a plain tensor, broadcast to ``shape``.
        shape: shape of the result in the home layout.
        around: any activation of the model.
    """
    offset = len(shape) - value.dim()
    own = _own_layout(value, layout, shape, offset, around)
    if own is None:
        return None
    states: list[State] = list(layout.states)
    if not _reaches(value, layout.features, shape):
        states = ["copy" if state == "features" else state for state in states]
    tensor = value.local if isinstance(value, Activation) else value
    own = own if own.by_features else replace(own, features=max(layout.features - offset, 0), parts=layout.parts)
    return around.surroundings.change(tensor, own, states)


def _own_layout(value: Tensor, layout: Layout, shape: torch.Size, offset: int, around: Activation) -> Layout | None:
    if isinstance(value, Activation):
        return value.placement
    surroundings = around.surroundings
    rows = None if layout.rows is None else layout.rows - offset
    if rows is not None and rows >= 0 and value.shape[rows] == shape[rows + offset]:
        return surroundings.home(rows)
    # A tensor without an axis of samples must be equal on all ranks. Parameters are. Buffers (running statistics),
    # masks and counts may depend on the data of each rank, so these are compared. Others are not, because numbers that
    # are computed from samples always differ.
    compared = is_own(value) or _is_exact(value)
    known = isinstance(value, nn.Parameter) or (compared and surroundings.alike(value))
    return surroundings.home(None) if known else None


def _is_exact(value: Tensor) -> bool:
    return not (value.dtype.is_floating_point or value.dtype.is_complex)


def is_own(value: Tensor) -> bool:
    """Whether a tensor is a buffer of the model or a view of one, and so is likely to be the same on all ranks."""
    base = value._base if value._is_view() else value
    return getattr(base, OWN, False)


OWN = "_autosync_of_model"
"""Attribute that marks the buffers of a model."""
