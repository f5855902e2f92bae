"""The times of synchronized passes, on one rank and agreed between ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.errors import ExchangeError

_RECENT = 32
"""Passes from which the usual time between passes is taken."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one pass.

    Attributes:
        whole: seconds from the end of the previous pass to the end of this one.
        unusual: seconds of it before the backward pass, as far as they exceed what is usual on this rank.
        compute: seconds of it in which this rank did not wait for gradients.
    """

    whole: float
    unusual: float
    compute: float

    @property
    def period(self) -> float:
        """Seconds of the pass without unusual delays. Of agreed times: without the delay of the rank that had most."""
        return self.whole - self.unusual


class OwnTimes:
    """The times of passes on this rank.

    What a rank spends between passes (data loading, validation, checkpoints, logging) counts only as far as it is
    usual on this rank.
    """

    def __init__(self) -> None:
        self._between: deque[float] = deque(maxlen=_RECENT)

    def of(self, trace: StepTrace) -> PassTimes:
        """The times of a pass; its trace begins where the previous pass ended."""
        self._between.append(trace.forward)
        unusual = max(0.0, trace.forward - statistics.median(self._between))
        wait = trace.synchronized - trace.backward
        return PassTimes(trace.synchronized, unusual, trace.synchronized - unusual - wait)


class OverlappingTimes:
    """The times of passes on this rank that may overlap with the next forward pass.

    A pass counts from its first gradient to the first gradient of the next pass. By then, its sums have come, because
    gradients change from there on. So each time is that of one plan, also where the next pass has another one.
    """

    def __init__(self) -> None:
        self._between: deque[float] = deque(maxlen=_RECENT)
        self._last: StepTrace | None = None

    def of(self, trace: StepTrace) -> PassTimes:
        """The times of the pass before; its trace ends where ``trace`` begins. They are 0 for the first one."""
        last, self._last = self._last, trace
        if last is None:
            return PassTimes(0.0, 0.0, 0.0)
        begin, end = last.origin + last.forward, trace.origin + trace.forward
        self._between.append(end - last.origin - last.backward - last.wait)
        unusual = max(0.0, self._between[-1] - statistics.median(self._between))
        return PassTimes(end - begin, unusual, end - begin - unusual - last.wait)


class AgreedTimes:
    """Agrees on times between ranks, while the next pass runs.

    A small all-reduce carries them. It is started at the end of a pass, when ranks are together, and its result is
    read at the end of the next one. So no rank waits for it, except where links are slower than a step. It also carries
    the plan that the rank has chosen for a later pass: a rank that chose another one is found before that pass, in
    which ranks with different plans would wait for each other.

    Args:
        group: the ranks; None is the default group.

    Attributes:
        prices: predicted step times, from the exchange that was last taken; empty if no rank had shared any.
        opening: whether a rank still opened a plan, in that exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.prices: Sequence[float] = ()
        self.opening = False
        self._under_way: deque[tuple[torch.Tensor, dist.Work, tuple[int, int]]] = deque()

    def share(
        self,
        own: PassTimes,
        choice: int = 0,
        present: int = 0,
        prices: Sequence[float] = (),
        opening: bool = False,
    ) -> None:
        """Start an exchange of times and of the next choice; collective.

        Args:
            own: the times on this rank; `take` returns the largest of all ranks.
            choice: number of the plan that this rank has chosen for a later pass, -1 for the end of tuning; `take`
                raises if ranks have chosen differently.
            present: number of the plan that is used when nothing is tried; likewise.
            prices: predicted step times, of the same number on all ranks; -inf on ranks that know none.
            opening: whether this rank still opens a plan.
        """
        # The largest of negated numbers is the negated least, so one all-reduce does for both.
        decided = [choice, present, -choice, -present]
        times = [own.whole, own.unusual, own.compute]
        numbers = torch.tensor([*times, *decided, opening, *prices], dtype=torch.float64)
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._under_way.append((numbers, work, (choice, present)))

    @property
    def under_way(self) -> int:
        """Number of times that were shared and not yet taken."""
        return len(self._under_way)

    def take(self) -> PassTimes:
        """The earliest times that were shared and not yet taken; collective.

        Raises:
            ExchangeError: a rank was lost, did not answer in time, or has chosen another plan.
        """
        numbers, work, decided = self._under_way.popleft()
        work.wait()
        whole, unusual, compute, choice, present, least_choice, least_present, opening, *prices = numbers.tolist()
        if (choice, present) != (-least_choice, -least_present):
            raise ExchangeError(
                f"tuning: ranks chose different plans for the same step ({self._told(decided)}). This is a fault of "
                "lightning-autosync: train with tuning='off', and report it"
            )
        self.prices = prices if all(map(math.isfinite, prices)) else ()
        self.opening = bool(opening)
        return PassTimes(whole, unusual, compute)

    def _told(self, decided: tuple[int, int]) -> str:
        """Which ranks decided for which plans, in words; collective. Decisions of fewer ranks come first."""
        ranks: dict[tuple[int, int], list[int]] = {}
        for rank, other in enumerate(gather_json(decided, self._group)):
            ranks.setdefault(tuple(other), []).append(rank)
        return "; ".join(
            f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}: "
            f"{'the end of tuning' if choice < 0 else f'plan number {choice}'}, with plan number {present} as the best"
            for (choice, present), some in sorted(ranks.items(), key=lambda item: len(item[1]))
        )

    def forget(self) -> None:
        """Ignore all times that are under way, without a wait for ranks that may be lost."""
        self._under_way.clear()
