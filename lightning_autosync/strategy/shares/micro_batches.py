"""`MicroBatches`: steps under a Trainer whose batches are computed in parts of one size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import MICRO_BATCH
from lightning_autosync.strategy.shares.direct_calls import DirectCalls
from lightning_autosync.strategy.shares.losses import loss_weight_of
from lightning_autosync.strategy.shares.memory import PartialSteps
from lightning_autosync.strategy.shares.part_logs import PartLogs
from lightning_autosync.strategy.shares.parts import IndivisibleError, Part, loss_of, parts_of


class WeightedBatch(Protocol):
    """The batch whose gradients are weighted."""

    part: float
    """Share of the part that is computed now in the terms of the loss of this rank's batch."""


class MicroBatches:
    """Computes each batch in parts, each with a forward and a backward pass; gradients are those of the whole batch.

    All parts but the last one are computed, with their backward passes, within the ``training_step`` of the batch.
    Lightning sets gradients to zero between that and the backward pass, which is the last part's. So gradients of the
    other parts are held until then.

    Args:
        size: number of samples of a part.
        backward: makes the backward pass of the loss of a part; gradients are only accumulated.
        settle: completes steps of the optimizer that are due.

    Attributes:
        calls: collective operations that a part calls directly.
        memory: computes micro-batches in smaller parts, where memory does not suffice; None if that ends the job.
    """

    def __init__(self, module: nn.Module, size: int, backward: Callable[..., None], settle: Callable[[], None]) -> None:
        self.size = size
        self.calls = DirectCalls()
        self.memory: PartialSteps | None = None
        self._limit = self._known = math.inf
        self._samples = 0
        self._module, self._backward, self._settle = module, backward, settle
        self._held: dict[nn.Parameter, Tensor] = {}

    @property
    def limit(self) -> float:
        """Most samples of a batch of this rank, in whole micro-batches; infinite as long as memory always sufficed.

        Memory for a batch grows with its samples. So whenever memory runs out, its micro-batches become half as many.
        """
        if self.memory is not None and self.memory.limit < self._known:
            self._known = self.memory.limit
            self._limit = max(1, self._samples // (2 * self.size)) * self.size
        return self._limit

    def forward(
        self, compute: Callable[[Any], Any], prepare: Callable[[], None], batch: Any, samples: int, cut: WeightedBatch
    ) -> Any:
        """The output of a training step; beside the loss, it is that of the last part.

        Args:
            compute: computes the output of a part.
            prepare: does what comes before each forward pass, on all ranks together.
            samples: number of samples in the batch.
            cut: the batch, for the weight of each part.

        Raises:
            PlanError: the batch cannot be cut, a part has no loss, or it calls a collective operation.
        """
        self._samples, size = samples, self.size
        if self.memory is not None:
            self.memory.begin()
            size = int(min(size, self.memory.limit))
        parts = deque(divided(batch, samples, size, self._module))
        prepare()
        logs, loss = PartLogs(self._module), None
        with ExitStack() as apart:
            while True:
                part = parts.popleft()
                cut.part = share = part[2]
                try:
                    output = self._compute(compute, part[0], logs, share)
                except Exception as error:
                    parts.extendleft(reversed(self._smaller(error, part)))
                    continue
                if not parts:
                    break
                if loss is None:  # after a forward pass, beside which gradients may travel with overlap
                    apart.enter_context(self._apart_from_older())
                loss = _added(loss, output, share)
                if torch.is_grad_enabled() and output["loss"].requires_grad:
                    self._accumulate(compute, output["loss"], part)
        cut.part = 1.0
        logs.log()
        cut.part = share
        whole = _added(loss, output, share)
        # The value is the whole batch's, and the gradient the last part's.
        last = output["loss"] + (whole - output["loss"].detach())
        if self.memory is not None:
            self.memory.keep_last(compute, last, part[0], part[1])
        return {**output, "loss": last}

    def _smaller(self, error: Exception, part: Part) -> list[Part]:
        """The parts in which to compute a part whose forward pass has failed; raises ``error`` if they do not help."""
        if self.memory is None:
            raise error
        return [(one, samples, share * part[2]) for one, samples, share in self.memory.smaller(error, *part[:2])]

    def _accumulate(self, compute: Callable[[Any], Any], loss: Tensor, part: Part) -> None:
        """Make the backward pass of a part that is not the last one."""
        if self.memory is None:
            self._backward(loss)
        else:
            self.memory.accumulate(compute, self._backward, loss, *part[:2])

    def _compute(self, compute: Callable[[Any], Any], part: Any, logs: PartLogs, share: float) -> dict[str, Any]:
        with self.calls.within_part(_refuse), logs.part(share):
            output = compute(part)
        loss = loss_of(output)
        if loss is None:
            raise PlanError(
                f"{MICRO_BATCH}: training_step returned no loss for a micro-batch; return one for each, or leave "
                f"{MICRO_BATCH} out"
            )
        return {**output, "loss": loss} if isinstance(output, Mapping) else {"loss": loss}

    @contextmanager
    def _apart_from_older(self) -> Iterator[None]:
        """A context whose gradients are held apart from those that parameters have already."""
        self._settle()
        self._held = {}
        trained = [each for each in self._module.parameters() if each.requires_grad]
        older = [each.grad for each in trained]
        try:
            _set_gradients(trained, [None] * len(trained))
            yield
            self._held = {each: each.grad for each in trained if each.grad is not None}
        finally:
            _set_gradients(trained, older)

    def add_held(self) -> None:
        """Add the gradients that are held to those of parameters; call it before the backward pass of a step."""
        with torch.no_grad():
            for parameter, gradient in self._held.items():
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
        self._held = {}


def _refuse(what: str) -> NoReturn:
    raise PlanError(
        f"{MICRO_BATCH}: training_step calls {what}, but ranks compute different numbers of micro-batches, and would "
        "call it different numbers of times; log with self.log(..., sync_dist=True), or call it in a hook after the "
        "step"
    )


def divided(batch: Any, samples: int, size: int, module: nn.Module | None) -> list[Part]:
    """The micro-batches of a batch; see `parts_of`.

    Args:
        samples: number of samples in the batch.
        size: number of samples of a micro-batch.
        module: the module that may have a ``loss_weight``; None if there is none.

    Raises:
        PlanError: the batch cannot be cut.
    """
    try:
        return parts_of(batch, samples, size, None if module is None else loss_weight_of(module))
    except IndivisibleError as error:
        raise PlanError(
            f"{MICRO_BATCH}: a batch of {samples} samples cannot be cut, because it has {error}; allowed: tensors and "
            "lists with one entry for each sample, in dictionaries, or in tuples and lists that have tensors too"
        ) from None


def check_divisible(module: nn.Module) -> None:
    """Refuse modules whose batches cannot be computed in parts.

    Raises:
        PlanError: the module optimizes manually; see also `check_norms`.
    """
    if not module.automatic_optimization:
        raise PlanError(
            f"{MICRO_BATCH}: with manual optimization, training_step makes its own backward passes; allowed with "
            "automatic optimization, and with Fabric"
        )
    check_norms(module)


def check_norms(module: nn.Module) -> None:
    """Refuse modules whose ranks wait for each other in each forward pass.

    Raises:
        PlanError: the module contains a ``SyncBatchNorm``.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                f"{MICRO_BATCH}: '{name}' is a SyncBatchNorm, which needs all ranks in each forward pass, but ranks "
                "compute different numbers of micro-batches; use plain BatchNorm (sync_batchnorm=False)"
            )


def _added(sum_so_far: Tensor | None, output: dict[str, Any], share: float) -> Tensor:
    part: Tensor = share * output["loss"].detach()
    return part if sum_so_far is None else sum_so_far + part


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
