"""`AutoShares`: shares that follow the measured speeds of ranks while a job trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autosync.engine.collectives import all_gather_single, group_device, separate_group
from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy.base import accumulation
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.shares.batch_shares import BatchCutter, BatchShares, PresentBatch
from lightning_autosync.strategy.shares.cuts import MICRO_BATCH, SharesOfRanks, check_length, divide, divide_batch
from lightning_autosync.strategy.shares.decision import FIRST_PASSES, Balancer, Pass
from lightning_autosync.strategy.shares.memory import PartialSteps
from lightning_autosync.strategy.shares.sampler import Position, SharedBatchSampler
from lightning_autosync.strategy.shares.streams import ChangingStreamBatches, StreamBatches, cut_stream_anew

EVERY, CALM = 3, 9
"""Synchronized passes between two exchanges of times, after the first ones; and when shares have not changed for long:
each exchange costs CPU time, which ranks lack that share cores."""
KEPT = 6
"""Last passes whose times are exchanged: two windows of the decision, so that one exchange can answer a slow rank."""

_Times = tuple[float, float, float]
"""Samples of this rank in a pass, seconds of its computation, and seconds of the step."""

now = time.perf_counter
"""The clock; tests replace it."""


class AutoShares(BatchShares):
    """Begins with equal shares, and changes them so that all ranks need the same time for their parts of a batch.

    Each rank measures its own time from the beginning of a batch to the end of the backward pass, without waiting for
    other ranks. Every few passes, ranks exchange these times while the next pass runs, and all come to the same
    decision. Shares then change at the first global batch that no rank has drawn yet.

    Passes that overlap end at different places of the programs of ranks, where an operation that waits for other ranks
    could wait for ever. So the first passes wait at their ends, until the first decisions are made and judged, and
    later each pass after which shares change.

    Args:
        device: the device of this rank.
        micro_batch: see `BatchShares`.

    Attributes:
        changes: shares that were taken, and the global batch from which they hold.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, micro_batch: int | None = None) -> None:
        super().__init__((1.0,) * ranks, rank, micro_batch)
        self.history = [SharesOfRanks.of(1, 0, self.shares, "equal until times are known")]
        self.changes: list[tuple[Position, tuple[int, ...]]] = []
        self._device = device
        self._balancer = Balancer()
        self._passes_done = 0
        self._total: int | None = None
        self._begun = self._busy = self._started = math.nan
        self._samples = 0
        self._ended: _Times | None = None
        self._measured: list[_Times] = []
        self._under_way: tuple[Tensor, Any] | None = None
        self._group: dist.ProcessGroup | None = None
        self._overlaps = self._begins = self._is_waiting = False
        self._usual = True
        self._next_change: tuple[tuple[int, ...], bool] | None = None

    def counts(self, position: Position, total: int) -> Sequence[int]:
        for begin, counts in reversed(self.changes):
            if begin <= position:
                return counts if sum(counts) == total else divide(total, counts, self.unit)
        return divide(total, (1.0,) * len(self.shares), self.unit)

    def begin_training(self, module: nn.Module, replica: Any, backward: Callable[..., None]) -> None:
        """See `BatchShares`; steps of automatic optimization for which memory does not suffice may be divided.

        A `SyncBatchNorm` communicates in each forward pass, so steps with one are not divided.
        """
        super().begin_training(module, replica, backward)
        synchronized = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        if not module.automatic_optimization or synchronized:
            return
        self.partial = PartialSteps(module, lambda: accumulation(replica), replica.scale.begin, replica.scale.arrived)
        if self.micro_batches is not None:
            self.micro_batches.memory, self.partial.calls = self.partial, self.micro_batches.calls

    def _cut_stream(self, loader: DataLoader[Any]) -> StreamBatches:
        assert loader.batch_size is not None
        total = loader.batch_size * len(self.shares)
        divide_batch(total, self.shares, self.unit)  # raises an error for one that cannot be cut
        return cut_stream_anew(loader, self, total, len(self.shares))

    # Measurement

    def begin_batch(self, batch: Any, sampler: BatchCutter | None = None) -> None:
        super().begin_batch(batch, sampler)
        self._begun = self._started = self._now()

    def resume(self, batch: PresentBatch) -> None:
        super().resume(batch)
        self._begun = self._started = math.nan  # the interruption was no part of the batch

    @property
    def waits_at_end(self) -> bool:
        return self._overlaps and (self._begins or self._next_change is not None)

    def overlap(self, timeout: float) -> None:
        self._group = separate_group(timeout)
        self._overlaps = self._begins = True

    def end_backward(self, overlaps: bool, usual: bool, steady: bool) -> None:
        self._usual = usual
        self._busy = self._now() - self._begun
        # A pass that overlaps will end within the next batch, and the waits of the one before it were in this batch.
        self._ended = self._times(now() - self._started if steady else math.nan) if overlaps else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        within, self._is_waiting, begun = self._is_waiting, True, now()
        try:
            with super().waiting():
                yield
        finally:
            self._is_waiting = within
            if not within:
                self._begun += now() - begun

    def _keep(self, steady: bool) -> bool:
        """Keep the times of a pass; returns whether it waited at its end.

        Under a plan that overlaps, times of passes that wait at their ends do not count.
        """
        times, self._ended = self._ended, None
        at_end = times is None
        if times is None:
            times = self._times(now() - self._started if steady else math.nan)
            if not self._usual and not self._begins:
                times = 0, math.nan, math.nan
        self._measured = [*self._measured, times][-KEPT:]
        return at_end

    def _times(self, step: float) -> _Times:
        """The times of a pass; not a number where it does not count.

        It counts if its batch was as large as others. The first pass does not, nor the first with another number of
        samples, because they allocate or compile.

        Args:
            step: seconds of the step.
        """
        busy, cut = self._busy, self.cut
        self._begun = self._started = now()
        if cut is not None and cut.total >= cut.ranks:  # else a rank without samples computes one of another rank's
            self._total = self._total or cut.total
        samples = 0 if cut is None or cut.total != self._total else cut.samples
        if samples != self._samples:
            busy = math.nan
        self._samples = samples or self._samples
        return samples, busy, step

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        return now()

    # Agreement

    def end_pass(self, steady: bool) -> None:
        self._passes_done += 1
        at_end = self._keep(steady)
        if self._next_change is None:
            self._agree()
        if self._next_change is not None and at_end:
            change, self._next_change = self._next_change, None
            self._change(*change)
        if self._begins and self._passes_done >= FIRST_PASSES and not self._balancer.on_trial and not self._under_way:
            self._begins, self._measured = False, []
            self._balancer.forget()

    def _agree(self) -> None:
        """Make the part of an agreement that is due after this pass."""
        if self._under_way is not None:
            self._decide()
        elif 1 < self._passes_done <= FIRST_PASSES:
            self._exchange()
            self._decide()  # at once: the sooner shares change, the fewer steps wait for a slow rank
        elif self._passes_done % (CALM if self._balancer.is_calm else EVERY) == 0:
            self._exchange()

    def _exchange(self) -> None:
        """Start to tell other ranks the times of this one."""
        missing = KEPT - len(self._measured)
        times = [value for each in self._measured for value in each] + [math.nan] * (3 * missing)
        self._measured = []
        limited = self.micro_batches or self.partial
        bound = math.inf if limited is None else limited.limit
        own = torch.tensor([[bound, *times]], dtype=torch.float64, device=group_device(self._group))
        table = own.new_zeros(len(self.shares), own.shape[1])
        self._under_way = (table, all_gather_single(table, own, self._group, async_op=True))

    def _decide(self) -> None:
        """Wait for the times of all ranks, which are those of the same passes, and decide whether shares change."""
        assert self._under_way is not None
        table, work = self._under_way
        self._under_way = None
        work.wait()
        bounds = table[:, 0].tolist()
        passes, expected = [], self.changes[-1][1] if self.changes else None
        for samples, busy, steps in zip(*(table[:, first::3].T.tolist() for first in (1, 2, 3)), strict=True):
            # Batches that were drawn before the last change tell nothing new.
            valid = all(0.0 < own < math.inf for own in busy) and sum(samples) == self._total
            if valid and (expected is None or tuple(samples) == expected):
                expected = tuple(map(int, samples))
                passes.append(Pass(busy, max(steps)))
        if not passes or expected is None:
            return
        taken_back = self._balancer.taken_back
        parts = [count // self.unit for count in expected]
        best = self._balancer.record(parts, passes, [bound / self.unit for bound in bounds])
        if best is None and not self.changes and (why := self._balancer.why_kept):
            self.history[0] = replace(self.history[0], why=f"equal: {why}")
        if best is not None:
            counts = tuple(self.unit * part for part in best)
            self._next_change = counts, self._balancer.taken_back > taken_back

    def _change(self, counts: tuple[int, ...], taken_back: bool) -> None:
        """Take other shares from the first batch that no rank has drawn.

        Args:
            counts: the new samples of each rank.
            taken_back: whether they are those before the last change.
        """
        assert isinstance(self.present.sampler, SharedBatchSampler | ChangingStreamBatches)
        number, batch = self.present.sampler.position
        # The largest of negated numbers is the negated least, so one all-reduce does for both.
        places = torch.tensor([number, -number, batch], dtype=torch.int64, device=group_device(self._group))
        dist.all_reduce(places, dist.ReduceOp.MAX, self._group)
        most, least, batch = places.tolist()
        if most != -least:
            raise ExchangeError(
                "batch_shares='auto': ranks make different passes over their data loaders; use the same loaders with "
                "the same num_workers on all ranks"
            )
        self.changes.append(((number, batch), counts))
        self.shares = tuple(map(float, counts))
        slowest = max(line.each for line in self._balancer.lines)
        speeds = ", ".join(f"{slowest / line.each:.2g}" for line in self._balancer.lines)
        why = "the last change made steps no faster" if taken_back else f"speeds relative to the slowest: {speeds}"
        self.history.append(SharesOfRanks.of(most, batch, counts, why))
        rank_zero_info(
            f"AutoSync: {self.history[-1].place}, ranks compute {', '.join(map(str, counts))} of {sum(counts)} "
            f"samples ({why})"
        )
        self._warn_of_norms()


def open_shares(settings: StrategySettings, rank: int, ranks: int, device: torch.device) -> BatchShares | None:
    """The shares of a job; None if batches are not shared out.

    Raises:
        PlanError: the number of shares is not ``ranks``.
    """
    setting, micro_batch = settings.batch_shares, settings.micro_batch
    if setting is None:
        return None
    if setting != "auto":
        check_length(setting, ranks)
    if ranks == 1:
        if micro_batch is not None:
            rank_zero_warn(f"AutoSync: {MICRO_BATCH} has no effect in a job with one rank; use accumulate_grad_batches")
        return None
    if setting == "auto":
        return AutoShares(rank, ranks, device, micro_batch)
    return BatchShares(setting, rank, micro_batch)
