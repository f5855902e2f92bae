"""Measures a workload by running a few training steps of a module in this process alone."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.description import (
    EMBEDDINGS,
    describe,
    parameter_owners,
    title,
    variable_names,
)
from lightning_autosync.workload.preservation import preserved
from lightning_autosync.workload.spec import Variable, Workload, is_row_sparse


class Clock:
    """Takes marks while work is in progress, which are read after the work; for work that ends with its call."""

    def mark(self) -> Any:
        """Mark the current point of the work, without waiting for it."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another."""
        return float(end - start)

    def synchronize(self) -> None:
        """Wait for all work; marks can be read afterwards."""


class DeviceClock(Clock):
    """A clock for work queued on a device: marks are timing events in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self._backend.Event(enable_timing=True)
        event.record(self._backend.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    def synchronize(self) -> None:
        self._backend.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock for work on ``device``."""
    return Clock() if device.type == "cpu" else DeviceClock(device)


@dataclass(frozen=True)
class _Gradient:
    """One gradient in one step.

    Attributes:
        ready: ready time in seconds from the start of backward.
        is_sparse: whether it is a sparse tensor.
        rows: number of touched rows; None if not counted.
    """

    ready: float
    is_sparse: bool
    rows: int | None


@dataclass(frozen=True)
class _Step:
    """Seconds of one step's passes, and its gradients by variable name."""

    forward: float
    backward: float
    gradients: dict[str, _Gradient]


def capture(
    module: nn.Module,
    batch: Any,
    *,
    steps: int = 5,
    warmup: int = 2,
    training_step: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Workload:
    """Measure the workload of ``module`` on one batch: medians over ``steps`` forward and backward passes.

    Logging is muted, nothing is communicated and no optimizer step is taken. The module, the batch and the random
    generators are restored afterwards, also after an error (see ``preserved`` for the limits). The module runs in its
    current training modes, and existing hooks of its parameters run too.

    The gradient of an embedding counts as ``row_sparse`` if less than half of its rows are nonzero. A parameter that
    got no gradient in any step keeps ``ready=None``.

    Args:
        module: the module; its parameters and the batch must be on one device.
        batch: the batch of a training step.
        steps: number of measured steps.
        warmup: number of steps before them that are not measured.
        training_step: function of ``(batch, batch_idx)`` or ``(batch)``; ``module.training_step`` by default. It
            returns the loss, a mapping with ``"loss"``, or ``None`` to skip the step.
        name: name of the workload; the class name by default.

    Raises:
        WorkloadError: the module cannot be described, spans several devices or optimizes manually, or its steps return
            no loss from which backward can start.
    """
    if steps < 1 or warmup < 0:
        raise WorkloadError(f"capture: needs steps >= 1 and warmup >= 0, got {steps} and {warmup}")
    described = describe(module, name)
    step = _with_batch_index(training_step or _own_training_step(module))
    clock = clock_of(_device(module))
    with preserved(module, batch), _isolated(module), _ready_marks(module, clock) as ready:
        results = [_measure(module, partial(step, batch, i), clock, ready) for i in range(warmup + steps)]
    return _summarize(described, [result for result in results[warmup:] if result is not None])


def _own_training_step(module: nn.Module) -> Callable[..., Any]:
    if not getattr(module, "automatic_optimization", True):
        raise WorkloadError(
            f"{title(module)}: optimizes manually, so its training_step cannot be run without taking "
            "optimizer steps; pass capture(training_step=...) a function that returns the loss"
        )
    step: Callable[..., Any] | None = getattr(module, "training_step", None)
    if step is None:
        raise WorkloadError(f"{title(module)}: has no training_step; pass capture(training_step=...)")
    return step


def _with_batch_index(step: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """The step as a function of batch and batch index; as in Lightning, a step may omit the batch index."""
    try:
        inspect.signature(step).bind(None, 0)
    except TypeError:
        return lambda batch, _: step(batch)
    return step


def _device(module: nn.Module) -> torch.device:
    devices = {parameter.device for _, parameter in variable_names(module)}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise WorkloadError(f"{title(module)}: trainable parameters must be on one device, found {found}")
    return devices.pop()


@contextmanager
def _isolated(module: nn.Module) -> Iterator[None]:
    """Let steps run without a trainer, without other ranks, and with gradients.

    The surrounding ``preserved`` restores what this overrides on the modules.
    """
    for part in module.modules():
        if hasattr(part, "automatic_optimization") and hasattr(part, "log_dict"):
            # A LightningModule logs into its trainer's running loop, but there is no trainer.
            vars(part).update(log=_log_nothing, log_dict=_log_nothing)
        if isinstance(part, nn.SyncBatchNorm):
            # SyncBatchNorm exchanges statistics between ranks; its base class does the same without communication.
            vars(part).update(forward=MethodType(_BatchNorm.forward, part))
    with torch.inference_mode(False):  # also enables gradients
        yield


def _log_nothing(*_: Any, **__: Any) -> None:
    return None


def _measure(module: nn.Module, step: Callable[[], Any], clock: Clock, ready: dict[nn.Parameter, Any]) -> _Step | None:
    """Run and time one step; ``None`` if the training step skipped it."""
    module.zero_grad(set_to_none=True)
    clock.synchronize()
    start = clock.mark()
    loss = _loss(step())
    if loss is None:
        return None
    ready.clear()  # drop marks of a backward that the step itself may have run
    forward_end = clock.mark()
    loss.backward()
    backward_end = clock.mark()
    clock.synchronize()
    owners = parameter_owners(module)
    gradients = {
        name: _observe(parameter.grad, owners[parameter], clock.seconds(forward_end, ready[parameter]))
        for name, parameter in variable_names(module)
        if parameter.grad is not None and parameter in ready
    }
    return _Step(clock.seconds(start, forward_end), clock.seconds(forward_end, backward_end), gradients)


def _loss(output: Any) -> Tensor | None:
    """The loss in a training step's output, by Lightning's rules."""
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            "training_step must return the loss as a tensor, a mapping with it under 'loss', or None; "
            f"got {type(output).__name__}" + (" without one" if isinstance(output, Mapping) else "")
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise WorkloadError(
            "training_step must return a loss of one element that depends on trainable parameters; "
            f"got shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        )
    return loss


@contextmanager
def _ready_marks(module: nn.Module, clock: Clock) -> Iterator[dict[nn.Parameter, Any]]:
    """Marks by parameter, each set when backward has completed the parameter's gradient."""
    marks: dict[nn.Parameter, Any] = {}

    def set_mark(parameter: Any) -> None:
        marks[parameter] = clock.mark()

    handles = [p.register_post_accumulate_grad_hook(set_mark) for _, p in variable_names(module)]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def _observe(gradient: Tensor, owners: list[nn.Module], ready: float) -> _Gradient:
    if gradient.is_sparse:
        return _Gradient(ready, True, int(gradient._indices()[0].unique().numel()))
    if gradient.dim() == 2 and any(isinstance(owner, EMBEDDINGS) for owner in owners):
        return _Gradient(ready, False, int(gradient.any(dim=1).sum()))
    return _Gradient(ready, False, None)


def _summarize(described: Workload, measured: list[_Step]) -> Workload:
    if not measured:
        raise WorkloadError(f"{described.name}: training_step returned None in every measured step")
    backward_time = median(step.backward for step in measured)
    variables = tuple(
        _with_gradients(
            variable,
            [s.gradients[variable.name] for s in measured if variable.name in s.gradients],
            backward_time,
        )
        for variable in described.variables
    )
    return Workload(
        name=described.name,
        variables=variables,
        forward_time=median(step.forward for step in measured),
        backward_time=backward_time,
    )


def _with_gradients(variable: Variable, gradients: list[_Gradient], backward_time: float) -> Variable:
    """The variable with ready time, kind and rows from its gradients; unchanged if it had none."""
    if not gradients:
        return variable
    # A gradient that occurred only in slower steps may have a median beyond the median end of backward.
    ready = min(median(gradient.ready for gradient in gradients), backward_time)
    update: dict[str, Any] = {"ready": ready, "kind": "dense", "rows": None}
    touched = [gradient.rows for gradient in gradients if gradient.rows is not None]
    if touched:
        rows = fmean(touched)
        if all(gradient.is_sparse for gradient in gradients):
            update |= {"kind": "sparse", "rows": rows}
        elif is_row_sparse(rows, variable.shape[0]):
            update |= {"kind": "row_sparse", "rows": rows}
    return variable.model_copy(update=update)
