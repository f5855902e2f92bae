"""Steps of users' own optimizers that are made later, and for a part of the parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.Rprop, optim.ASGD,
)  # fmt: skip
MARK = "steps_parameters_separately"
"""Attribute by which a class of optimizers says that it treats each parameter by itself, as those above do."""


class DeferredStep:
    """A call of an optimizer's step for the parameters of one group, with the settings that the group had then.

    Args:
        optimizer: the optimizer.
        group: its group. Schedulers may change it before the step is made.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.optimizer = optimizer
        settings = ((name, value) for name, value in group.items() if name != "params")
        # Schedulers change a learning rate that is a tensor in place.
        self._settings = {name: value.clone() if isinstance(value, Tensor) else value for name, value in settings}

    def group_of(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        """A group of the optimizer with some of the parameters."""
        return {**self._settings, "params": parameters}


def why_whole(optimizer: Optimizer) -> str:
    """The reason why an optimizer must step all its parameters at once; empty if it need not."""
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and not getattr(kind, MARK, False):
        return f"{kind.__name__} is not known to step parameters separately (its class may say so: {MARK} = True)"
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return f"another function replaced the step of {kind.__name__}"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__} is differentiable"
    return ""


def make_steps(due: Sequence[tuple[nn.Parameter, DeferredStep]]) -> None:
    """Make deferred steps of some parameters, as their optimizers would have made them."""
    by_optimizer: dict[int, dict[int, tuple[DeferredStep, list[nn.Parameter]]]] = {}
    for parameter, step in due:
        groups = by_optimizer.setdefault(id(step.optimizer), {})
        groups.setdefault(id(step), (step, []))[1].append(parameter)
    for groups in by_optimizer.values():
        first, _ = next(iter(groups.values()))
        _step(first.optimizer, [step.group_of(members) for step, members in groups.values()])


def _step(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    method: Any = type(optimizer).step
    if getattr(method, "hooked", False):
        method = method.__wrapped__  # without the hooks, which ran when the step was called
    saved, optimizer.param_groups = optimizer.param_groups, groups
    device = groups[0]["params"][0].device.type
    try:
        # The caller may be a forward pass in any mode, but the step must compute as after backward.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
            method(optimizer)
    finally:
        optimizer.param_groups = saved
