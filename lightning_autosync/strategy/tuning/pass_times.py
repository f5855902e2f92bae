"""The times of synchronized passes, on one rank and agreed between ranks."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.errors import ExchangeError

_RECENT = 32
"""Passes from which the usual time between passes is taken."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one pass.

    Attributes:
        period: seconds from the end of the previous pass to the end of this one.
        compute: seconds of it in which the rank did not wait for gradients; of all ranks, the largest.
        wait: seconds that the rank waited for gradients after its backward pass; of all ranks, the least.
    """

    period: float
    compute: float
    wait: float


class OwnTimes:
    """The times of passes on this rank.

    What a rank spends between passes (data loading, validation, checkpoints, logging) counts only as far as it is
    usual on this rank. Other ranks wait for such a rank, so the least period of all ranks is the one without delays.
    """

    def __init__(self) -> None:
        self._between: deque[float] = deque(maxlen=_RECENT)

    def of(self, trace: StepTrace) -> PassTimes:
        """The times of a pass; its trace begins where the previous pass ended."""
        self._between.append(trace.forward)
        unusual = max(0.0, trace.forward - statistics.median(self._between))
        wait = trace.synchronized - trace.backward
        period = trace.synchronized - unusual
        return PassTimes(period, period - wait, wait)


class AgreedTimes:
    """Agrees on times between ranks, while the next pass runs.

    A small all-reduce carries them. It is started at the end of a pass, when ranks are together, and its result is
    read at the end of the next one. So no rank waits for it, except where links are slower than a step. It also carries
    the plan that the rank has chosen for a later pass: a rank that chose another one is found before that pass, in
    which ranks with different plans would wait for each other.

    Args:
        group: the ranks; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._under_way: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def share(self, own: PassTimes, plan: int = 0) -> None:
        """Start to agree on times and on the index of a plan; collective."""
        # The least of negated numbers is the negated largest, so one all-reduce does for both.
        numbers = torch.tensor([own.period, -own.compute, own.wait, plan, -plan], dtype=torch.float64)
        work = dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None
        self._under_way.append((numbers, work))

    @property
    def under_way(self) -> int:
        """Number of times that were shared and not yet taken."""
        return len(self._under_way)

    def take(self) -> PassTimes:
        """The earliest times that were shared and not yet taken; collective.

        Raises:
            ExchangeError: a rank was lost, did not answer in time, or has chosen another plan.
        """
        numbers, work = self._under_way.popleft()
        work.wait()
        period, compute, wait, least, most = numbers.tolist()
        if least != -most:
            raise ExchangeError(
                f"tuning: ranks chose different plans for the same step ({least:.0f} and {-most:.0f}); this is a fault "
                "of lightning-autosync: train with tuning='off', and report it"
            )
        return PassTimes(period, -compute, wait)

    def forget(self) -> None:
        """Ignore all times that are under way, without a wait for ranks that may be lost."""
        self._under_way.clear()
