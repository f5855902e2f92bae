"""`AutoShares`: shares that follow the measured speeds of ranks while a job trains."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autosync.engine.collectives import group_device
from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy.base import accumulation
from lightning_autosync.strategy.log import rank_zero_info
from lightning_autosync.strategy.shares.batch_shares import BatchCutter, BatchShares, PresentBatch
from lightning_autosync.strategy.shares.cuts import Shares, check_length, divide
from lightning_autosync.strategy.shares.decision import FIRST_PASSES, Balancer, Pass
from lightning_autosync.strategy.shares.memory import PartialSteps
from lightning_autosync.strategy.shares.sampler import Position, SharedBatchSampler
from lightning_autosync.strategy.shares.streams import ChangingStreamBatches, StreamBatches, cut_stream_anew

EVERY = 3
"""Synchronized passes between two exchanges of times, after the first ones."""

now = time.perf_counter
"""The clock; tests replace it."""


class AutoShares(BatchShares):
    """Begins with equal shares, and changes them so that all ranks need the same time for their parts of a batch.

    Each rank measures its own time from the beginning of a batch to the end of the backward pass, without waiting for
    other ranks. Every few passes, ranks exchange these times while the next pass runs, and all come to the same
    decision. Shares then change at the first global batch that no rank has drawn yet.

    Args:
        rank: this rank.
        ranks: number of ranks.
        device: the device of this rank.

    Attributes:
        changes: shares that were taken, and the global batch from which they hold.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__((1.0,) * ranks, rank)
        self.changes: list[tuple[Position, tuple[int, ...]]] = []
        self._device = device
        self._balancer = Balancer()
        self._passes_done = 0
        self._total: int | None = None
        self._begun = self._busy = self._started = math.nan
        self._samples = 0
        self._measured: list[tuple[float, float, float]] = []
        self._under_way: tuple[Tensor, Any] | None = None

    def counts(self, position: Position, total: int) -> Sequence[int]:
        for begin, counts in reversed(self.changes):
            if begin <= position:
                return counts if sum(counts) == total else divide(total, counts)
        return divide(total, (1.0,) * len(self.shares))

    def begin_training(self, module: nn.Module, replica: Any) -> None:
        """See `BatchShares`; steps of automatic optimization for which memory does not suffice may be divided.

        A `SyncBatchNorm` communicates in each forward pass, so steps with one are not divided.
        """
        super().begin_training(module, replica)
        if not module.automatic_optimization or any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            return
        self.partial = PartialSteps(module, lambda: accumulation(replica), replica.scale.begin, replica.scale.arrived)

    def _cut_stream(self, loader: DataLoader[Any]) -> StreamBatches:
        assert loader.batch_size is not None
        return cut_stream_anew(loader, self, loader.batch_size * len(self.shares), len(self.shares))

    # Measurement

    def begin_batch(self, batch: Any, sampler: BatchCutter | None = None) -> None:
        super().begin_batch(batch, sampler)
        self._begun = self._started = self._now()

    def resume(self, batch: PresentBatch) -> None:
        super().resume(batch)
        self._begun = self._started = math.nan  # the interruption was no part of the batch

    def end_backward(self) -> None:
        self._busy = self._now() - self._begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = now()
        try:
            yield
        finally:
            self._begun += now() - begun

    def _keep(self, steady: bool) -> None:
        """Keep the times of a pass; not a number where it does not count.

        It counts if its batch was as large as others. The first pass does not, nor the first with another number of
        samples, because they allocate or compile.
        """
        ended, cut = now(), self.cut
        busy, step = self._busy, ended - self._started if steady else math.nan
        self._begun = self._started = ended
        if cut is not None and cut.total >= cut.ranks:  # else a rank without samples computes one of another rank's
            self._total = self._total or cut.total
        samples = 0 if cut is None or cut.total != self._total else cut.samples
        if samples != self._samples:
            busy = math.nan
        self._samples = samples or self._samples
        self._measured = [*self._measured, (samples, busy, step)][-EVERY:]

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        return now()

    # Agreement

    def end_pass(self, steady: bool) -> None:
        self._passes_done += 1
        self._keep(steady)
        if self._under_way is not None:
            self._decide()
        elif 1 < self._passes_done <= FIRST_PASSES:
            self._exchange()
            self._decide()  # at once: the sooner shares change, the fewer steps wait for a slow rank
        elif self._passes_done % EVERY == 0:
            self._exchange()

    def _exchange(self) -> None:
        """Start to tell other ranks the times of this one."""
        missing = EVERY - len(self._measured)
        times = [value for each in self._measured for value in each] + [math.nan] * (3 * missing)
        self._measured = []
        bound = math.inf if self.partial is None else self.partial.limit
        own = torch.tensor([[bound, *times]], dtype=torch.float64, device=group_device(None))
        table = own.new_zeros(len(self.shares), own.shape[1])
        self._under_way = (table, dist.all_gather_into_tensor(table, own, async_op=True))

    def _decide(self) -> None:
        """Wait for the times of all ranks, which are those of the same passes, and change shares if that pays."""
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
        best = self._balancer.record(expected, passes, bounds)
        if best is not None:
            self._change(tuple(best), self._balancer.taken_back > taken_back)

    def _change(self, counts: tuple[int, ...], taken_back: bool) -> None:
        """Take other shares from the first batch that no rank has drawn.

        Args:
            counts: the new samples of each rank.
            taken_back: whether they are those before the last change.
        """
        assert isinstance(self.present.sampler, SharedBatchSampler | ChangingStreamBatches)
        number, batch = self.present.sampler.position
        # The largest of negated numbers is the negated least, so one all-reduce does for both.
        places = torch.tensor([number, -number, batch], dtype=torch.int64, device=group_device(None))
        dist.all_reduce(places, dist.ReduceOp.MAX)
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
        rank_zero_info(
            f"AutoSync: from batch {batch} of this epoch on, ranks compute {', '.join(map(str, counts))} of "
            f"{sum(counts)} samples ({why})"
        )


def open_shares(
    setting: Shares | Literal["auto"] | None, rank: int, ranks: int, device: torch.device
) -> BatchShares | None:
    """The shares of a job; None if batches are not shared out.

    Raises:
        PlanError: the number of shares is not ``ranks``.
    """
    if setting is None:
        return None
    if setting != "auto":
        check_length(setting, ranks)
    if ranks == 1:
        return None
    return AutoShares(rank, ranks, device) if setting == "auto" else BatchShares(setting, rank)
