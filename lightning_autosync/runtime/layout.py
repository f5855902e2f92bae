"""Where the variables of a dense message lie in its buffer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def variable_views(parameters: Sequence[nn.Parameter], buffer: Tensor, axis: int) -> list[Tensor]:
    """For each parameter, its part of the buffer in the parameter's own shape.

    Args:
        parameters: in message order.
        buffer: [numel + tail].
        axis: the message's; moved to the front in the buffer.
    """
    views, offset = [], 0
    for parameter in parameters:
        part = buffer[offset : offset + parameter.numel()]
        if axis:
            shape = (parameter.shape[axis], *parameter.shape[:axis], *parameter.shape[axis + 1 :])
            views.append(part.view(shape).movedim(0, axis))
        else:
            views.append(part.view(parameter.shape))
        offset += parameter.numel()
    return views
