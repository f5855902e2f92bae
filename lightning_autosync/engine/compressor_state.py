"""The state of compressors by parameter. It survives a change of plan, a skipped step and a new loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autosync.engine.gradients import real_view, variable_views
from lightning_autosync.plan.codecs.powersgd import low_rank_layout
from lightning_autosync.plan.schedule import Message


@dataclass(frozen=True)
class ParameterState:
    """The compressor state of one parameter.

    Attributes:
        compressor: kind and settings, as plain values; only a plan with equal ones can load this state.
        tensors: ``residual``, of the parameter's shape: the part of the mean gradient that encoding lost on this rank;
            ``factor`` [columns, rank]: the current factor of PowerSGD's power iteration, equal on all ranks.
    """

    compressor: dict[str, Any]
    tensors: dict[str, Tensor]

    def fits(self, other: ParameterState) -> bool:
        """Whether ``other`` can be loaded into this state."""
        return (
            self.compressor == other.compressor
            and self.tensors.keys() == other.tensors.keys()
            and all(tensor.shape == other.tensors[key].shape for key, tensor in self.tensors.items())
        )


ParameterStates = dict[str, ParameterState]
"""States by parameter name."""


class CompressorState:
    """The compressor state of all messages of an engine.

    Live residuals have the scale of the gradients, which a gradient scaler changes from step to step. `state_dict` and
    `load_state_dict` use residuals of unscaled gradients.

    Args:
        messages: every message with its parameters.
        tensors: live tensors by message name: ``residual`` [numel + tail], ``factors`` (PowerSGD's second factors).
    """

    def __init__(
        self,
        messages: Iterable[tuple[Message, list[nn.Parameter]]],
        tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self._residuals = [found["residual"] for found in tensors.values() if "residual" in found]
        self._tensors = [tensor for found in tensors.values() for tensor in found.values()]
        self._saved: list[Tensor] = []
        self._scale = 1.0
        self._live: ParameterStates = {}
        for message, parameters in messages:
            self._live.update(_by_variable(message, parameters, tensors.get(message.name, {})))

    @property
    def has_residuals(self) -> bool:
        return bool(self._residuals)

    def begin_step(self, loss_scale: float | None) -> None:
        """Prepare for gradients of a loss scaled by ``loss_scale``; unless it is None, `undo_step` may follow."""
        scale = 1.0 if loss_scale is None else loss_scale
        if scale != self._scale:
            for residual in self._residuals:
                residual.mul_(scale / self._scale)
            self._scale = scale
        # Only a gradient scaler skips steps, so only then is a copy needed.
        if loss_scale is None:
            return
        if not self._saved:
            self._saved = [torch.empty_like(tensor) for tensor in self._tensors]
        for saved, tensor in zip(self._saved, self._tensors, strict=True):
            saved.copy_(tensor)

    def undo_step(self) -> None:
        """Restore the state from before this step, whose gradients are not used."""
        for saved, tensor in zip(self._saved, self._tensors, strict=True):
            tensor.copy_(saved)

    def state_dict(self) -> ParameterStates:
        """Copies of the state, unscaled."""
        return {
            name: ParameterState(
                state.compressor,
                {
                    key: tensor / self._scale if key == "residual" else tensor.clone()
                    for key, tensor in state.tensors.items()
                },
            )
            for name, state in self._live.items()
        }

    def load_state_dict(self, state: ParameterStates) -> list[str]:
        """Load all states that fit; returns the names of the parameters whose state does not."""
        left_out = []
        for name, found in state.items():
            here = self._live.get(name)
            if here is None or not here.fits(found):
                left_out.append(name)
                continue
            for key, tensor in here.tensors.items():
                tensor.copy_(found.tensors[key])
                if key == "residual":
                    tensor.mul_(self._scale)
        return left_out


def check_scale(scale: float) -> float:
    """``scale``, if it is a valid loss scale.

    Raises:
        ValueError: it is not a positive number.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"loss_scale: {scale} is not a positive number")
    return scale


def _by_variable(message: Message, parameters: list[nn.Parameter], tensors: Mapping[str, Tensor]) -> ParameterStates:
    """Views of a message's state, by parameter."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in message.variables}
    if "residual" in tensors:
        views = variable_views(parameters, tensors["residual"], message.axis)
        for name, view in zip(message.variables, views, strict=True):
            found[name]["residual"] = view
    if "factors" in tensors:
        shapes = [tuple(real_view(parameter).shape) for parameter in parameters]
        for name, factor in zip(message.variables, low_rank_layout(shapes, message.compressor.rank)[0], strict=True):
            part = tensors["factors"][factor.second : factor.second + factor.second_numel]
            if factor.rank:
                found[name]["factor"] = part.view(factor.columns, factor.rank)
    settings = message.compressor.model_dump()
    return {name: ParameterState(settings, parts) for name, parts in found.items() if parts}
