"""Checks that a split model computes the same as the unsplit one: compares one step of both on every rank.

The unsplit model's step is plain data parallelism: each rank has its own samples, and one all-reduce per parameter
averages the gradients. It is independent of the code that runs the split model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.gradients import real_view
from lightning_autosync.engine.replicas import ReplicaCheck
from lightning_autosync.errors import AutoSyncError, EquivalenceError, ExchangeError, PeerLost, PlanError
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.dropout_watch import WithoutDropout, draws, dropout_faults
from lightning_autosync.hybrid.execution.reduction import GradientReduction
from lightning_autosync.hybrid.execution.split_model import Part, SplitModel
from lightning_autosync.workload.preservation import preserved

T = TypeVar("T")


@dataclass(frozen=True)
class ComparedStep:
    """A training step for the comparison.

    Attributes:
        step: function that runs the module on this rank's batch and returns the loss.
        optimizers: function that makes optimizers for the current parameters of the module.
        narrowed: the dtype to which autocast narrows numbers within ``step``; None if it does not.
    """

    step: Callable[[], Any]
    optimizers: Callable[[], Sequence[Optimizer]]
    batch: Any = None
    narrowed: torch.dtype | None = None


_PASS = -1
"""Number of the compared forward passes; with equal numbers they draw the same random numbers."""
_TOLERANCES = {8: 1e-7, 4: 1e-3, 2: 5e-2, 1: 5e-2}
"""Largest relative error of a gradient, by bytes per real number. Wrong rewrites have errors of at least some tenths.
Weights of a byte are narrowed for storage only, and computed with in a wider dtype."""
_BUFFERS = 1e-3
"""Largest relative error of an element of a buffer where no autocast narrows numbers."""
_SMALL = 1e-3
"""Smallest scale of a gradient's error, as a share of the norm of all gradients."""
_SMALL_NARROWED = 5e-2
"""The same where numbers of two bytes add up to gradients. Some of these cancel and leave rounding only, as that of a
bias before a batch norm, and rounding errors of bfloat16 are 1/256 of the summands."""
_SHOWN = 4
"""Largest number of faults in an error."""


@dataclass
class Expectation:
    """The result of the unsplit model's step, restricted to this rank's parts.

    Attributes:
        gradients: gradients of the mean loss by parameter; None for a parameter without gradient.
        norms: norms of the whole gradients by parameter.
        updates: changes of the weights by parameter, after two optimizer steps with ``gradients``.
        buffers: buffers after the step, by name.
    """

    loss: float = math.nan
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    narrowed: torch.dtype | None = None

    @property
    def norm(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))


def expect(split: SplitModel, task: ComparedStep) -> Expectation:
    """Run a step of the unsplit module, and restore the module; collective.

    Raises:
        PlanError: a complex parameter trains.
        AutoSyncError: weights differ between ranks, or the step fails or returns no loss on some rank; raised on every
            rank.
    """
    _refuse_complex(split)
    group = split.mesh.group(split.mesh.dimensions)
    try:
        ReplicaCheck(0, group).run(dict(split.module.named_parameters()))
    except ExchangeError as error:
        raise EquivalenceError(f"the unsplit model is not the same on all ranks: {error}") from None
    found = Expectation(narrowed=task.narrowed)
    parts = split.parts
    with preserved(split.module, without=[part.parameter for part in parts.values()]), _gradients_aside(split):
        made = _together(task.optimizers, split)
        found.loss = _run(split, task)
        found.buffers = {name: buffer.detach().clone() for name, buffer in split.module.named_buffers()}
        whole = {name: _mean(part.parameter, group) for name, part in parts.items()}
        for part in parts.values():
            part.parameter.grad = None
        _together(lambda: _note_gradients(found, parts, whole, made), split)
    return found


def _refuse_complex(split: SplitModel) -> None:
    for name, part in split.parts.items():
        if part.parameter.is_complex() and part.parameter.requires_grad:
            raise PlanError(
                f"plan: parameter '{name}' is complex, but split models reduce only real gradients: freeze it, or use "
                "AutoSyncStrategy"
            )


def _note_gradients(
    found: Expectation, parts: Mapping[str, Part], whole: dict[str, Tensor | None], optimizers: Sequence[Optimizer]
) -> None:
    for name, part in parts.items():
        gradient = whole.pop(name)
        found.gradients[name] = None if gradient is None else part.shard.take(gradient)
        if gradient is not None:
            found.norms[name] = float(gradient.norm())
            update = _update(part, gradient, optimizers)
            if update is not None:
                found.updates[name] = update


def verify(split: SplitModel, reduction: GradientReduction, task: ComparedStep, expected: Expectation) -> None:
    """Compare a step of the split model with the expectation, and restore the model; collective.

    It uses up the expected gradients.

    Raises:
        EquivalenceError: the results differ; the message names the differences; raised on every rank.
        AutoSyncError: the step fails or returns no loss on some rank; raised on every rank.
        PeerLost: a rank is gone; other ranks may still wait for it.
    """
    parts = split.parts
    with preserved(split.module, without=[part.parameter for part in parts.values()]), _gradients_aside(split):
        made = _together(task.optimizers, split)
        _together(lambda: _refuse_whole_state(split, made), split)
        loss = _run(split, task, reduction)
        faults = _loss_faults(split, loss, expected)
        faults += _gradient_faults(split, expected)
        faults += _buffer_faults(split, expected)
        faults += _together(lambda: _update_faults(split, made, expected), split)
        # Report faults of the step first: random numbers are checked only if the model is correct without dropout.
        _tell(faults, split)
        drawn = _together(lambda: draws(split, task.step, task.batch), split)
        _tell(dropout_faults(split, drawn), split)


def _refuse_whole_state(split: SplitModel, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that are older than the split: no step fits parameters in parts and a state of the whole."""
    for name, part in split.parts.items():
        state = [optimizer.state[part.parameter] for optimizer in optimizers if part.parameter in optimizer.state]
        shapes = [tuple(value.shape) for one in state for value in one.values() if isinstance(value, Tensor)]
        if part.shard.shape != part.shard.local_shape and part.shard.shape in shapes:
            raise EquivalenceError(
                f"the optimizer has state for the whole of parameter '{name}', which is split now; make a new "
                "optimizer in configure_optimizers"
            )


def untested(split: SplitModel, expected: Expectation) -> list[str]:
    """Paths of the split modules of which `verify` says nothing, because their gradients are zero or nearly so."""
    names = {part.parameter: name for name, part in split.parts.items()}
    found = []
    for layer in split.plan.layers:
        if all(signature == "dp" for signature in layer.signature):
            continue
        trained = [one for one in split.module.get_submodule(layer.module).parameters() if one.requires_grad]
        if trained and all(_is_negligible(names[parameter], parameter.dtype, expected) for parameter in trained):
            found.append(layer.module)
    return found


def _is_negligible(name: str, dtype: torch.dtype, expected: Expectation) -> bool:
    return expected.norms.get(name, 0.0) <= _tolerance(dtype, expected) * _small(dtype, expected) * expected.norm


def _run(split: SplitModel, task: ComparedStep, reduction: GradientReduction | None = None) -> float:
    """Run one step without dropout; returns the loss and leaves the gradients in the parameters."""
    # A rank without a loss must not leave the others alone in the collectives that follow.
    loss = _together(lambda: _loss(split, task), split)
    _together(lambda: _backward(loss, reduction), split)
    return float(loss.detach())


def _loss(split: SplitModel, task: ComparedStep) -> Tensor:
    with WithoutDropout(split.module), split.forward(task.batch, number=_PASS):
        loss = bring_home(task.step())
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise EquivalenceError(
            f"training_step returned {type(loss).__name__}; expected a loss of one element that depends on "
            "parameters, to compare the split model with the unsplit one"
        )
    return loss


def _backward(loss: Tensor, reduction: GradientReduction | None) -> None:
    with nullcontext() if reduction is None else reduction.backward():
        loss.backward()


def _together(work: Callable[[], T], split: SplitModel) -> T:
    """The result of ``work``, which every rank does, if it succeeds on all of them; collective.

    Raises:
        AutoSyncError: ``work`` failed on some rank; raised on every rank.
    """
    cause: Exception | None = None
    try:
        found = work()
    except (PeerLost, dist.DistError, torch.OutOfMemoryError, MemoryError):
        raise  # other ranks may be within a collective of ``work``, where they would not hear of it
    except Exception as error:
        cause = error
    by_rank = gather_json(_reason(cause), split.mesh.group(split.mesh.dimensions))
    failed = [rank for rank, theirs in enumerate(by_rank) if theirs]
    if not failed:
        return found
    if isinstance(cause, AutoSyncError) and len(failed) == len(by_rank):
        raise cause
    ranks = ", ".join(map(str, failed))
    raise EquivalenceError(
        f"the training step that compares the split model with the unsplit one failed on rank {ranks}: "
        f"{by_rank[failed[0]]}"
    ) from cause


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, AutoSyncError) else f"{type(error).__name__}: {error}"


@contextmanager
def _gradients_aside(split: SplitModel) -> Iterator[None]:
    parameters = [part.parameter for part in split.parts.values()]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _mean(parameter: nn.Parameter, group: dist.ProcessGroup) -> Tensor | None:
    """The mean over ranks of a gradient, where a missing one counts as zero; None if no rank has one."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
    gradient = gradient.contiguous()  # NCCL refuses others, such as those of transposed weights
    used = torch.tensor([parameter.grad is not None], dtype=torch.int64, device=parameter.device)
    dist.all_reduce(used, group=group)
    if not int(used):
        return None
    dist.all_reduce(gradient, group=group)
    return gradient.div_(dist.get_world_size(group))


def _update(part: Part, gradient: Tensor, optimizers: Sequence[Optimizer]) -> Tensor | None:
    """[local shape] the change of this rank's part of a parameter by an optimizer; None if no optimizer has it.

    Parameters are updated one at a time, so that the optimizers need memory for the state of one parameter only.
    """
    parameter = part.parameter
    before = parameter.detach().clone()
    owner = next((optimizer for optimizer in optimizers if _owns(optimizer, parameter)), None)
    if owner is None:
        return None
    parameter.grad = gradient
    try:
        with trial_step(owner, [parameter]):
            _steps(owner)
            return part.shard.take(parameter.detach() - before)
    finally:
        parameter.grad = None
        with torch.no_grad():
            parameter.copy_(before)


def _owns(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is own for group in optimizer.param_groups for own in group["params"])


def _steps(optimizer: Optimizer) -> None:
    """Take two steps with the same gradients: what an optimizer estimates in a step may change only later ones."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise EquivalenceError(
            "LBFGS needs the whole gradient on one rank; use an optimizer that updates each element by itself"
        )
    for group in optimizer.param_groups:
        if not float(group["lr"]):  # a warm-up may start at 0, and then updates would show nothing
            group["lr"] = group.get("initial_lr") or 1e-3
    for _ in range(2):
        optimizer.step()


def _loss_faults(split: SplitModel, loss: float, expected: Expectation) -> list[str]:
    # Integers, as of quantized weights, say nothing of the precision in which the loss is computed.
    dtypes = {part.parameter.dtype for part in split.parts.values()}
    limits = [_tolerance(dtype, expected) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if abs(loss - expected.loss) <= max(limits, default=_TOLERANCES[4]) * max(1e-3, abs(expected.loss)):
        return []
    return [f"the loss is {loss:.6g}, but {expected.loss:.6g} in the unsplit model"]


def _tolerance(dtype: torch.dtype, expected: Expectation) -> float:
    own = _TOLERANCES[dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize]
    return own if expected.narrowed is None else max(own, _TOLERANCES[expected.narrowed.itemsize])


def _small(dtype: torch.dtype, expected: Expectation) -> float:
    """The smallest scale of a gradient's error, as a share of the norm of all gradients."""
    return _SMALL if _tolerance(dtype, expected) < _TOLERANCES[2] else _SMALL_NARROWED


def _gradient_faults(split: SplitModel, expected: Expectation) -> list[str]:
    everything, faults = expected.norm, []
    for name, part in split.parts.items():
        found, wanted = part.parameter.grad, expected.gradients[name]
        if wanted is None:
            if found is not None and bool(found.any()):
                faults.append(f"parameter '{name}' has a gradient, but none in the unsplit model")
            continue
        distance = float(wanted.norm() if found is None else (found - wanted).norm())
        scale = max(expected.norms[name], _small(wanted.dtype, expected) * everything)
        if not distance <= _tolerance(wanted.dtype, expected) * scale:
            faults.append(f"the gradient of '{name}' differs by {distance / max(scale, 1e-30):.2g} of its norm")
    return faults


def _buffer_faults(split: SplitModel, expected: Expectation) -> list[str]:
    faults = []
    for name, buffer in split.module.named_buffers():
        wanted = expected.buffers.get(name)
        relative = _BUFFERS if expected.narrowed is None else _TOLERANCES[expected.narrowed.itemsize]
        if wanted is not None and not _alike(buffer, wanted, relative):
            faults.append(f"buffer '{name}' has different values after the step than in the unsplit model")
    return faults


def _alike(found: Tensor, wanted: Tensor, relative: float) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return torch.allclose(
        real_view(found).double(), real_view(wanted).double(), relative, 1e-2 * relative, equal_nan=True
    )


def _update_faults(split: SplitModel, optimizers: Sequence[Optimizer], expected: Expectation) -> list[str]:
    """Compare optimizer steps with the expected gradients, because small errors of gradients may change steps a lot."""
    parts = {name: part for name, part in split.parts.items() if name in expected.updates}
    before = {name: part.parameter.detach().clone() for name, part in parts.items()}
    for name, part in split.parts.items():
        part.parameter.grad = expected.gradients.pop(name)  # not copied: memory is short here
    try:
        with ExitStack() as trials:
            for optimizer in optimizers:
                trials.enter_context(trial_step(optimizer, [part.parameter for part in parts.values()]))
                _steps(optimizer)
        return [fault for name, part in parts.items() if (fault := _step_fault(name, part, before[name], expected))]
    finally:
        with torch.no_grad():
            for name, part in parts.items():
                part.parameter.copy_(before[name])


def _step_fault(name: str, part: Part, before: Tensor, expected: Expectation) -> str:
    """What is wrong with an optimizer's steps from the weights ``before``; empty if nothing is."""
    found, wanted = part.parameter.detach() - before, expected.updates[name]
    rounding = torch.finfo(wanted.dtype).eps * float(before.norm())
    distance, scale = float((found - wanted).norm()), float(wanted.norm())
    if distance <= 1e-3 * scale + 4 * rounding:
        return ""
    return f"the optimizer's steps of '{name}' differ by {distance / max(scale, 1e-30):.2g} of their norm"


def _tell(faults: list[str], split: SplitModel) -> None:
    by_rank = gather_json(faults, split.mesh.group(split.mesh.dimensions))
    told = list(dict.fromkeys(fault for theirs in by_rank for fault in theirs))
    if not told:
        return
    ranks = [rank for rank, theirs in enumerate(by_rank) if theirs]
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    raise EquivalenceError(
        f"the split model does not compute the same as the unsplit one (on rank {', '.join(map(str, ranks))}): "
        f"{'; '.join(told[:_SHOWN])}{more}"
    )


@contextmanager
def trial_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context of a step of an optimizer; its end restores the settings in the optimizer's groups and its state.

    The optimizer may be the one that trains, if the model keeps it. Groups are restored because some optimizers count
    their steps there.

    Args:
        parameters: the parameters that have gradients. They are not restored.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state, stepped = dict(optimizer.state), set(parameters)
    # The step leaves the state of other parameters alone; only entries for no parameter may be of all of them.
    changed = [value for key, value in state.items() if key in stepped or not isinstance(key, Tensor)]
    try:
        with preserved(groups, changed):
            yield
    finally:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _become(group, {"params": group["params"], **before})
        _become(optimizer.state, state)


def _become(values: dict[Any, Any], before: dict[Any, Any]) -> None:
    values.clear()
    values.update(before)
