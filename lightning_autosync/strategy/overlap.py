"""``overlap="step"``: what may overlap in a module and its optimizers, and the lines that say what does not."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autosync.engine import StepOverlap, defer_steps
from lightning_autosync.engine.due_parameter import due_of
from lightning_autosync.plan import Schedule, SyncPlan
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.replica_comparison import CALM
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.workload.description import COMPILED

_WAIT = "steps wait for gradients at the end of the backward pass"
_REASONS = (
    f"for a while, because parameters were frozen, unfrozen or replaced (until {CALM} steps bring no other change)",
    "in the first steps, which show the time of the computation, by which other plans are predicted",
    "in each step in which weights are compared (check_replicas)",
    "while batch_shares='auto' measures the first steps, and in the last step before each change of shares",
)


def make_overlap(module: nn.Module, settings: StrategySettings) -> StepOverlap | None:
    """What lets the steps of a module's parameters overlap; None if the settings or the module do not allow it.

    Rank 0 says why, if it is the module.
    """
    if settings.overlap is None:
        return None
    if reason := _why_not(module):
        rank_zero_info(f"AutoSync: overlap: {_WAIT}, because {reason}")
        return None
    return StepOverlap(module, settings.overlap_debug, _tell_reader)


def defer_steps_of(optimizers: Iterable[Optimizer], settings: StrategySettings) -> None:
    """Let the steps of optimizers overlap. Rank 0 says why an optimizer's cannot; these wait for all gradients."""
    for optimizer in optimizers:
        if reason := defer_steps(optimizer, settings.overlap_debug):
            rank_zero_info(f"AutoSync: overlap: {_WAIT}, because {reason}")


def can_overlap(module: nn.Module) -> bool:
    """Whether the steps of a module's parameters can overlap."""
    return not _why_not(module)


def why_no_overlap(plan: SyncPlan, schedule: Schedule | None) -> str:
    """Why no step overlaps under a plan; empty if some can."""
    messages = [] if schedule is None else schedule.messages
    if plan.waits:
        return "the plan waits at the end of the backward pass (waits: true)"
    if not all(each.waits_in_backward for each in messages):
        return ""
    if all(group.topology == "shared_memory" for group in plan.groups):
        return "the ranks of one machine sum gradients in shared memory, and wait for each other in the backward pass"
    return "all messages of this plan wait at the end of the backward pass"


class WaitLog:
    """Tells on rank 0, once for each reason, why the steps of a job that overlaps wait at times."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, *holds: bool) -> None:
        """Note the reasons of a step that waits: changed parameters, tuning, a comparison of weights, and shares."""
        for reason, holding in zip(_REASONS, holds, strict=True):
            if holding:
                self._say(f"{_WAIT} {reason}")

    def tell_compiled(self) -> None:
        """Note that a forward pass of compiled code follows."""
        self._say("steps wait for gradients before each forward pass, because the module is compiled")

    def _say(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            rank_zero_info(f"AutoSync: overlap: {line}")


def reading_past_failures(module: nn.Module | None) -> AbstractContextManager[Any]:
    """A context in which parameters that have no value after a failure are read as they are."""
    if module is not None and any(due_of(parameter) is not None for parameter in module.parameters()):
        return cast(AbstractContextManager[Any], torch._C.DisableTorchFunctionSubclass())
    return nullcontext()


def reading_forms() -> AbstractContextManager[Any]:
    """A context in which this thread reads shapes and layouts of parameters, and waits for no step that is due."""
    return cast(AbstractContextManager[Any], torch._C.DisableTorchFunctionSubclass())


def _tell_reader(reader: str) -> None:
    rank_zero_info(f"AutoSync: overlap: {_WAIT} where {reader} needs them before the optimizer's step")


def _why_not(module: nn.Module) -> str:
    devices = {str(parameter.device) for parameter in module.parameters()}
    others = sorted(each for each in devices if each != "cpu" and not each.startswith("cuda"))
    if others:
        return f"the model is on '{others[0]}', and steps overlap on CPUs and CUDA devices only"
    if len(devices) > 1:
        return f"the model is on several devices: {', '.join(sorted(devices))}"
    for name, part in module.named_modules():
        called = f"'{name}'" if name else "the model"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{called} is a TorchScript module"
        # Lightning keeps the compiler of a compiled LightningModule in `_compiler_ctx`.
        marks = (vars(part).get(each) for each in ("_compiled_call_impl", "_compiler_ctx"))
        if COMPILED in part._modules or any(mark is not None for mark in marks):
            return f"{called} is compiled"
        if method := _compiled_method(part):
            return f"'{method}' of {called} is compiled"
        if getattr(vars(part).get("forward"), "__module__", None) == "torch.cuda.graphs":
            return f"{called} runs as a CUDA graph"
        for parameter_name, parameter in part.named_parameters(recurse=False):
            if type(parameter) is not nn.Parameter:
                return f"'{parameter_name}' of {called} is a {type(parameter).__name__}, a class of its own"
    return ""


def _compiled_method(part: nn.Module) -> str:
    """Name of a method or attribute that `torch.compile` made for a module; empty if there is none."""
    for place in (vars(part), *map(vars, type(part).__mro__)):
        for name, value in place.items():
            marks = vars(value) if isinstance(value, FunctionType) else {}
            # `torch.compiler.disable` leaves both marks.
            if "_torchdynamo_orig_callable" in marks and "_torchdynamo_disable" not in marks:
                return name
    return ""
