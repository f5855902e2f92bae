"""Where the parameters of a dense message lie in its buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself; a complex one as reals, with a last axis of two: real and imaginary part."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def variable_views(
    parameters: Sequence[nn.Parameter], buffer: Tensor, axis: int, keep_strides: bool = False
) -> list[Tensor]:
    """For each parameter, its part of the buffer in the parameter's own shape (complex ones as `real_view` has them).

    Args:
        parameters: in message order.
        buffer: [numel + tail].
        axis: the message's; moved to the front in the buffer.
        keep_strides: whether elements lie in the order in which the parameter has them in memory, where it is dense
            (``channels_last``, transposed), so that copies between the two are straight; needs ``axis`` 0.
    """
    views, offset = [], 0
    for parameter in map(real_view, parameters):
        part = buffer[offset : offset + parameter.numel()]
        if axis:
            shape = (parameter.shape[axis], *parameter.shape[:axis], *parameter.shape[axis + 1 :])
            views.append(part.view(shape).movedim(0, axis))
        elif keep_strides and is_dense(parameter):
            views.append(part.as_strided(parameter.shape, parameter.stride(), part.storage_offset()))
        else:
            views.append(part.view(parameter.shape))
        offset += parameter.numel()
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether each element has a place of its own in memory, without gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in one order in memory."""
    return all(
        mine == theirs for mine, theirs, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1
    )
