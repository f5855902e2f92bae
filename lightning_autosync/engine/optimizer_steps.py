"""Steps of users' own optimizers that are made later, and for a part of the parameters at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.Rprop, optim.ASGD,
)  # fmt: skip
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
MARK = "steps_parameters_separately"
"""Attribute by which a class of optimizers says that it treats each parameter by itself, as those above do.

Subclasses do not inherit it: their steps may do more.
"""


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

    @property
    def in_any_order(self) -> bool:
        """Whether ranks may make such steps in different orders. Steps of a user's class may draw random numbers."""
        return type(self.optimizer) in _ELEMENTWISE

    def group_of(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        """A group of the optimizer with some of the parameters."""
        return {**self._settings, "params": parameters}


def why_whole(optimizer: Optimizer) -> str:
    """The reason why an optimizer must step all its parameters at once; empty if it need not."""
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and not vars(kind).get(MARK, False):
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
    part = part_of(optimizer, groups)
    device = groups[0]["params"][0].device.type
    # The caller may be a forward pass in any mode, but the step must compute as after backward.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False), _not_compiling():
        method(part)


@contextmanager
def _not_compiling() -> Iterator[None]:
    """A context in which PyTorch's optimizers do not see that it is `torch.compile` that reads a parameter.

    They round otherwise in steps that are compiled.
    """
    compiler: Any = torch.compiler
    compiling, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    try:
        yield
    finally:
        compiler._is_compiling_flag = compiling


def part_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A shallow copy of an optimizer with its state, but with other groups and without hooks of its step."""
    part: Optimizer = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))
    vars(part).pop("step", None)  # that of a scheduler, bound to the optimizer
    vars(part).update({name: OrderedDict() for name in _HOOKS})
    part.param_groups = groups
    return part


def take_over(optimizer: Optimizer, part: Optimizer) -> None:
    """Set attributes and settings of groups that the step of a part has changed in the optimizer."""
    kept = {*_HOOKS, "param_groups", "step"}
    vars(optimizer).update({name: value for name, value in vars(part).items() if name not in kept})
    for group, stepped in zip(optimizer.param_groups, part.param_groups, strict=True):
        group.update({name: value for name, value in stepped.items() if name != "params"})


def hooks_would_see_parts(optimizer: Optimizer, hook: Callable[..., Any]) -> bool:
    """Whether hooks of a step would see a part of the optimizer, if the pre-hook ``hook`` put one in its place."""
    before, after = (getattr(optimizer, name) for name in _HOOKS)
    if type(optimizer) in _ELEMENTWISE:
        return next(reversed(before.values())) is not hook
    # Its step may call that of its parent, which runs all hooks again.
    return len(before) + len(after) > 2 or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
