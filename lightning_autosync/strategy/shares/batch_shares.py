"""`BatchShares`: the shares of one job, and the weight of the batch that this rank computes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_autosync.engine.collectives import group_device
from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import (
    LOSS_WEIGHT,
    MICRO_BATCH,
    Cut,
    Shares,
    SharesOfRanks,
    divide,
    divide_batch,
)
from lightning_autosync.strategy.shares.loaders import CUTTABLE, global_batches
from lightning_autosync.strategy.shares.losses import check_loss, loss_weight_of
from lightning_autosync.strategy.shares.memory import PartialSteps
from lightning_autosync.strategy.shares.micro_batches import MicroBatches, check_divisible, divided
from lightning_autosync.strategy.shares.sampler import Position, SharedBatchSampler
from lightning_autosync.strategy.shares.streams import GlobalStream, StreamBatches, cut_stream

BatchCutter = SharedBatchSampler | StreamBatches


@dataclass
class PresentBatch:
    """The batch that gradients belong to.

    Attributes:
        cut: how it was cut; None: its loader is not cut, so it has no gradients.
        sampler: the sampler of its loader; None if the loader is not cut.
        data: the batch, for the module's ``loss_weight``; None if no module has one, or after it was asked.
        weight: the factor of its gradients; None before it is known.
        part: the share in ``weight`` of the part of the batch that is computed now.
        loss_sum: this rank's ``loss_weight``, and the all-reduce of those of all ranks.
    """

    cut: Cut | None = None
    sampler: BatchCutter | None = None
    data: Any = None
    weight: float | None = None
    part: float = 1.0
    loss_sum: tuple[float, Tensor, dist.Work] | None = None


class BatchShares:
    """Cuts global batches, and knows the weight of this rank's part of the present one.

    Args:
        shares: the share of each rank, in any unit.
        micro_batch: number of samples that a rank computes at once; None: all of its batch.

    Attributes:
        shares: the shares of the batches that are cut now.
        history: all shares so far, for reports.
        unit: parts of full batches are multiples of so many samples.
        present: the present batch.
        needs_batches: whether a module has a ``loss_weight``, which takes batches.
        open_passes: number of passes over loaders that have begun and not ended, under Fabric.
        partial: computes steps, or their micro-batches, for which memory does not suffice; None if they end the job.
        micro_batches: computes steps in parts of ``micro_batch`` samples; None if they are not, and under Fabric.
    """

    def __init__(self, shares: Shares, rank: int, micro_batch: int | None = None) -> None:
        self.shares = shares
        self.history = [SharesOfRanks.of(1, 0, shares, "given")]
        self.rank = rank
        self.unit = micro_batch or 1
        self.present = PresentBatch()
        self.needs_batches = False
        self.open_passes = 0
        self.partial: PartialSteps | None = None
        self.micro_batches: MicroBatches | None = None
        self._micro_batch = micro_batch
        self._divides = False
        self._passes = 0
        self._sampler: BatchCutter | None = None
        self._in_step = self._checked = False
        self._norm = ""

    # Data

    def cut_loader(self, loader: object) -> BatchCutter:
        """Let ``loader`` load this rank's parts of global batches.

        A global batch has as many samples as the loader's batches on all ranks.

        Returns:
            The sampler, for `begin_batch`.

        Raises:
            PlanError: the loader cannot be cut, or a rank would get no sample of a full batch.
        """
        sampler: BatchCutter
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, GlobalStream):
            sampler = self._cut_stream(loader)
        else:
            sampler = SharedBatchSampler(*global_batches(loader, self, self.shares))
        # DataLoader refuses to set this attribute, and only the user's code knows how to make another one.
        object.__setattr__(loader, "batch_sampler", sampler)
        self._sampler = sampler
        return sampler

    def check_loader(self, loader: object) -> None:
        """Refuse a loader whose full batches cannot be cut, before anything is set up.

        Raises:
            PlanError: see `divide_batch`.
        """
        if isinstance(loader, DataLoader) and loader.batch_size is not None:
            divide_batch(loader.batch_size * len(self.shares), self.shares, self.unit)

    def _cut_stream(self, loader: DataLoader[Any]) -> StreamBatches:
        assert loader.batch_size is not None
        total = loader.batch_size * len(self.shares)
        return cut_stream(loader, divide_batch(total, self.shares, self.unit), self.rank)

    def begin_pass(self) -> int:
        """See `Dealer`."""
        self._passes += 1
        return self._passes

    def counts(self, position: Position, total: int) -> Sequence[int]:
        """See `Dealer`."""
        return divide(total, self.shares, self.unit)

    # Steps

    def note_norms(self, module: nn.Module) -> None:
        """Warn of batch norm in ``module``, as soon as shares are unequal."""
        norms = (
            f"'{name}' is a {type(part).__name__}"
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
        )
        self._norm = self._norm or next(norms, "")
        self._warn_of_norms()

    def _warn_of_norms(self) -> None:
        # The statistics of micro-batches do not depend on shares.
        if self._norm and self._micro_batch is None and min(self.shares) < max(self.shares):
            rank_zero_warn(
                f"AutoSync: {self._norm}, whose statistics are those of one rank's samples, so they depend on its "
                "share of a batch. SyncBatchNorm takes those of all ranks"
            )
            self._norm = ""

    def begin_training(self, module: nn.Module, replica: Any, backward: Callable[..., None]) -> None:
        """Begin training under a Trainer.

        Args:
            replica: its `ExactReplica`.
            backward: makes the backward pass of the loss of a part of a batch; gradients are only accumulated.

        Raises:
            PlanError: see `check_step` and `check_divisible`.
        """
        check_step(module)
        if self._micro_batch is not None:
            check_divisible(module)
            self.micro_batches = MicroBatches(module, self._micro_batch, backward, replica.settle)

    def begin_batch(self, batch: Any, sampler: BatchCutter | None = None) -> None:
        """Begin to compute the next batch of a loader.

        Args:
            batch: the batch, for the module's ``loss_weight``.
            sampler: the sampler of the loader; None: of the loader that was cut last.
        """
        sampler = self._sampler if sampler is None else sampler
        if sampler is None:
            raise PlanError(f"batch_shares: the training data are in no loader that AutoSync cuts; {CUTTABLE}")
        self.present = PresentBatch(sampler.take(), sampler, batch if self.needs_batches else None)

    def begin_uncut_batch(self) -> None:
        """Begin a batch of a loader that is not cut; a gradient of it is an error."""
        self.present = PresentBatch()

    def skip_batch(self) -> None:
        """Pass over a batch of the loader that was cut last, which is not computed."""
        if self._sampler is not None:
            self._sampler.take()

    def resume(self, batch: PresentBatch) -> None:
        """Go on with a batch that another loader's batches interrupted, in an evaluation for example."""
        self.present = batch

    @property
    def cut(self) -> Cut | None:
        """How the present batch was cut; None before the first, and if it was not cut."""
        return self.present.cut

    def begin_forward(self, module: nn.Module) -> None:
        """Ask the module for the weight of its loss, if it knows one, once for each batch; collective.

        Raises:
            PlanError: the weight is not a number of at least 0.
        """
        loss_weight = loss_weight_of(module)
        present = self.present
        if loss_weight is None or present.cut is None or present.weight is not None or present.loss_sum is not None:
            return
        own = float(loss_weight(present.data)) if present.cut.samples else 0.0
        present.data = None
        if not 0.0 <= own < math.inf:
            raise PlanError(f"{LOSS_WEIGHT}: {own:g} is not a number of at least 0; return how many terms the loss has")
        total = torch.tensor(own, dtype=torch.float64, device=group_device(None))
        present.loss_sum = own, total, dist.all_reduce(total, async_op=True)

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients of the present batch.

        Raises:
            PlanError: there is no batch whose cut is known, or under Fabric it is not divided into micro-batches.
        """
        if self.present.weight is None:
            self.present.weight = self._find_weight(self.present)
        if self._micro_batch is not None and self.micro_batches is None and not self._divides:
            raise PlanError(
                f"{MICRO_BATCH}: a gradient arrived of a batch that was not divided; make the passes of "
                "`for part in fabric.strategy.micro_batches(batch)`, and then the optimizer's step"
            )
        return self.present.weight * self.present.part

    def _find_weight(self, batch: PresentBatch) -> float:
        if batch.cut is None:
            raise PlanError(
                "batch_shares: a gradient arrived, but there is no batch of a loader that AutoSync cuts, or the last "
                f"batch is of another loader; under Fabric, pass the training loader to setup_dataloaders; {CUTTABLE}"
            )
        if batch.loss_sum is None:
            return batch.cut.weight
        own, total, work = batch.loss_sum
        with self.waiting():
            work.wait()
        return len(self.shares) * own / float(total) if float(total) else 0.0

    @contextmanager
    def step(self, module: nn.Module) -> Iterator[None]:
        """The context of a ``training_step``, in which means over ranks are means over samples; see `weigh`."""
        self.begin_forward(module)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def training_step(
        self,
        module: Any,
        whole: Callable[[], Any],
        prepare: Callable[[], None],
        precision: Callable[[], AbstractContextManager[Any]],
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The output of a step on ``batch``, which may be computed in parts.

        Args:
            whole: computes the output of the batch.
            prepare: does what ``whole`` does on all ranks together, before a batch that is computed in parts.
            precision: the context in which the module computes a part.
            *args: other arguments of the module's ``training_step``.
            **kwargs: the same, by name.

        Raises:
            PlanError: see `check_loss`.
        """

        def compute(part: Any) -> Any:
            with precision():
                return module.training_step(part, *args, **kwargs)

        with self.step(module):
            if self.cut is None:
                return self.checked(whole(), module)
            samples = max(1, self.cut.samples)
            if self.micro_batches is not None:
                return self.checked(self.micro_batches.forward(compute, prepare, batch, samples, self.present), module)
            if self.partial is None:
                return self.checked(whole(), module)
            return self.checked(self.partial.forward(whole, compute, prepare, batch, samples), module)

    def before_backward(self) -> PartialSteps | None:
        """Called before the backward pass of a step, when gradients of steps before have been set to zero.

        Returns:
            What makes the backward pass; None: it is an ordinary one.
        """
        if self.micro_batches is not None:
            self.micro_batches.add_held()
        return self.partial

    def divide(
        self, batch: Any, module: nn.Module | None, accumulate: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[Any]:
        """Yield the micro-batches of the present batch under Fabric, in the order in which they are computed.

        Args:
            batch: the batch, as the loader returned it.
            module: the module that has a ``loss_weight``; None if none has.
            accumulate: a context in which backward passes only accumulate gradients.

        Raises:
            PlanError: the batch cannot be cut.
        """
        present = self.present
        if self._micro_batch is None or present.cut is None:
            yield batch
            return
        parts = divided(batch, max(1, present.cut.samples), self._micro_batch, module)
        self._divides = True
        try:
            for number, (part, _, share) in enumerate(parts):
                present.part = share
                with accumulate() if number + 1 < len(parts) else nullcontext():
                    yield part
        finally:
            self._divides, present.part = False, 1.0

    def weigh(self, value: Any, operation: Any) -> Any:
        """What this rank gives to a reduction, so that a mean over ranks within a step is the mean over samples.

        Lightning rounds means of whole numbers down, so they become floats.

        Args:
            value: this rank's value.
            operation: the reduction, as for ``Strategy.reduce``.
        """
        mean = operation == dist.ReduceOp.AVG or (isinstance(operation, str) and operation.lower() in ("mean", "avg"))
        if not mean or not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        if not self._in_step or self.weight == 1.0:
            return value
        return value * self.weight if self.weight else torch.zeros_like(value)

    def checked(self, output: Any, module: nn.Module) -> Any:
        """The ``output`` of a training step, whose loss is checked in the first one.

        Raises:
            PlanError: see `check_loss`.
        """
        if not self._checked and loss_weight_of(module) is None:
            check_loss(output)
        self._checked = True
        return output

    # What `AutoShares` does beyond

    @property
    def waits_at_end(self) -> bool:
        """Whether the next synchronized pass has to wait for other ranks at its end, also with overlap."""
        return False

    def overlap(self, timeout: float) -> None:
        """Let passes overlap: they end within the forward pass of the next batch; collective.

        Args:
            timeout: seconds to wait for other ranks.
        """

    def end_backward(self, overlaps: bool, usual: bool, steady: bool) -> None:
        """Called at the end of a synchronized backward pass, before this rank waits for others.

        Args:
            overlaps: whether it waits within the forward pass of the next batch.
            usual: whether it does so in all passes under the present plan, apart from some that have to wait.
            steady: see `end_pass`.
        """

    def end_pass(self, steady: bool) -> None:
        """Called on all ranks after each synchronized pass; collective.

        Args:
            steady: whether the plan stays as it is; otherwise steps may take longer because of another plan.
        """

    def collective(self, what: str) -> AbstractContextManager[None]:
        """The context of a collective operation of the user's; ``what`` is its name for messages.

        Raises:
            PlanError: ranks would call it different numbers of times in this step.
        """
        if self._in_step:
            if self.partial is not None:
                self.partial.note_collective(what)
            if self.micro_batches is not None:
                self.micro_batches.calls.note(what)
        return self.waiting()

    def check_gather(self, value: Tensor, group: dist.ProcessGroup | None) -> None:
        """Refuse to gather tensors of different sizes in a ``training_step``; collective within it.

        Raises:
            PlanError: (on every rank) ranks have different numbers of elements, because their batches are unequal.
        """
        if not self._in_step:
            return
        sizes = torch.tensor([value.numel(), -value.numel()], device=group_device(group))
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
        most, least = int(sizes[0]), -int(sizes[1])
        if most != least:
            raise PlanError(
                f"batch_shares: training_step gathers tensors with {least} to {most} elements from ranks with unequal "
                "batches; gather tensors whose size does not depend on the batch, or do not use batch_shares"
            )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The context in which this rank waits for others, or makes collective operations that users do not see."""
        divider = self.micro_batches or self.partial
        with nullcontext() if divider is None else divider.calls.left_out():
            yield


def check_step(module: nn.Module) -> None:
    """Refuse a ``training_step`` that takes batches from the loader itself.

    Raises:
        PlanError: it has an argument ``dataloader_iter``.
    """
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:  # type: ignore[arg-type]
        raise PlanError("batch_shares: training_step takes dataloader_iter; allowed: one that takes batches")
