"""Differentiable changes of a value's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.hybrid.execution import collectives
from lightning_autosync.hybrid.execution.layouts import Layout, Move, Operation, Place, State, moves
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh


def change_layout(value: Tensor, source: Layout, states: Sequence[State], mesh: LiveMesh) -> Tensor:
    """A rank's part of a value in another layout; collective along the dimensions that change.

    Args:
        value: this rank's part in the layout ``source``.
        states: states of the result; axes and parts stay.
    """
    for move in moves(source, tuple(states), mesh.sizes):
        value = _Change.apply(value, move, mesh)
    return value


def change_gradient(gradient: Tensor, source: Layout, states: Sequence[State], mesh: LiveMesh) -> Tensor:
    """A rank's part of the gradient of a value before `change_layout`, from that after it; collective.

    Raises:
        AutoSyncError: the gradient is to be differentiated again.
    """
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise AutoSyncError("a gradient of a split value cannot be differentiated again (create_graph=True)")
    for move in reversed(moves(source, tuple(states), mesh.sizes)):
        gradient = move_gradient(gradient, move, mesh)
    return gradient


class _Change(torch.autograd.Function):
    """One move of a value; backward makes the opposite move of its gradient."""

    takes_parts = True

    @staticmethod
    def forward(ctx: Any, value: Tensor, move: Move, mesh: LiveMesh) -> Tensor:
        ctx.move, ctx.mesh = move, mesh
        # ``data`` hides views from autograd, which refuses in-place changes of views that a Function returns.
        return move_value(value, move, mesh).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return move_gradient(gradients[0], ctx.move, ctx.mesh), None, None


def move_value(value: Tensor, move: Move, mesh: LiveMesh) -> Tensor:
    """A rank's part of a value after a move."""
    return _operate(value, move.kind, move.dimension, move.take, move.put, mesh)


def move_gradient(gradient: Tensor, move: Move, mesh: LiveMesh) -> Tensor:
    """The gradient of a value before a move, from its gradient after the move."""
    ranks = mesh.sizes[move.dimension]
    # Scale the gradient where it is smaller: before it is gathered, or after it is summed.
    if move.scale == "divide":
        gradient = gradient / ranks
    gradient = _operate(gradient, move.back, move.dimension, move.put, move.take, mesh)
    return gradient * ranks if move.scale == "times" else gradient


def _operate(
    value: Tensor, operation: Operation, dimension: int, take: Place | None, put: Place | None, mesh: LiveMesh
) -> Tensor:
    if operation == "keep":
        return value
    ranks, own = mesh.sizes[dimension], mesh.coordinates[dimension]
    if operation == "sum":
        return collectives.total(value, mesh.line(dimension))
    if operation == "gather":
        assert put is not None
        return _put_blocks(collectives.gather(value, mesh.line(dimension)), put)
    if operation == "pad":
        # A value's ``take`` is its gradient's ``put``.
        assert put is not None
        blocks = value.new_zeros((ranks, *value.shape))
        blocks[own] = value
        return _put_blocks(blocks, put)
    assert take is not None
    blocks = take_blocks(value, take, ranks)
    if operation == "cut":
        return blocks[own].clone(memory_format=torch.contiguous_format)
    if operation == "scatter":
        return collectives.scatter(blocks, mesh.line(dimension))
    assert put is not None
    return _put_blocks(collectives.exchange(blocks, mesh.line(dimension)), put)


def take_blocks(value: Tensor, place: Place, ranks: int) -> Tensor:
    """[ranks, ...] the ranks' blocks of a value at a position; a view if the strides allow it."""
    before, after = value.shape[: place.axis], value.shape[place.axis + 1 :]
    extent = value.shape[place.axis] // ranks
    split = value.reshape(*before, place.outer, ranks, extent // place.outer, *after)
    return split.movedim(place.axis + 1, 0).flatten(place.axis + 1, place.axis + 2)


def _put_blocks(blocks: Tensor, place: Place) -> Tensor:
    """The inverse of `take_blocks`."""
    ranks, shape = blocks.shape[0], blocks.shape[1:]
    split = blocks.unflatten(place.axis + 1, (place.outer, shape[place.axis] // place.outer))
    together = split.movedim(0, place.axis + 1)
    return together.reshape(*shape[: place.axis], shape[place.axis] * ranks, *shape[place.axis + 1 :])
