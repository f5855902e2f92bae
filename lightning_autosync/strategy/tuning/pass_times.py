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
from lightning_autosync.engine.notes import Notes
from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.errors import ExchangeError

NOTES = 9
"""Numbers of a rank in an exchange of times."""
_RECENT = 32
"""Passes from which the usual time between passes is taken."""

PAUSE = 0.5
"""Relative excess over the usual time between passes that overlap from which it is a delay of the training loop."""


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
        """Seconds of the pass without unusual delays; see `AgreedTimes.take` for agreed times."""
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
        usual = statistics.median(self._between)
        unusual = self._between[-1] - usual
        # Small ones are what messages cost the forward pass, which is part of the price of overlap.
        unusual = unusual if unusual > PAUSE * usual else 0.0
        return PassTimes(end - begin, unusual, end - begin - unusual - last.wait)


class AgreedTimes:
    """Agrees on times between ranks, while the next pass runs.

    They travel with the gradients of the next pass, or in a small exchange if the next pass has no message that can
    carry them. That is started at the end of a pass, when ranks are together, and its result is read at the end of the
    next one. So no rank waits for it, except where links are slower than a step. With the times travels the plan that
    the rank has chosen for a later pass: a rank that chose another one is found before that pass, in which ranks with
    different plans would wait for each other.

    Args:
        group: the ranks; None is the default group.
        overlaps: whether times are those of `OverlappingTimes`.

    Attributes:
        opening: whether a rank still opened a plan, in the exchange that was last taken.
        priced: whether a rank knew new predictions, in that exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, overlaps: bool = False) -> None:
        self._group, self._overlaps = group, overlaps
        self.opening = self.priced = False
        self._under_way: deque[tuple[Notes | tuple[torch.Tensor, dist.Work], list[float]]] = deque()

    def share(
        self,
        own: PassTimes,
        choice: int = 0,
        present: int = 0,
        opening: bool = False,
        priced: bool = False,
        notes: Notes | None = None,
    ) -> None:
        """Start an exchange of times and of the next choice; collective.

        Args:
            own: the times on this rank.
            choice: number of the plan that this rank has chosen for a later pass, -1 for the end of tuning; `take`
                raises if ranks have chosen differently.
            present: number of the plan that is used when nothing is tried; likewise.
            opening: whether this rank still opens a plan.
            priced: whether this rank knows new predictions.
            notes: numbers that travel with the gradients of the next pass; None if none do.
        """
        # The largest of negated numbers is the negated least, so one maximum does for both.
        numbers = [own.whole, own.unusual, own.compute, choice, present, -choice, -present, opening, priced]
        if notes is not None:
            notes.write(numbers)
            self._under_way.append((notes, numbers))
        else:
            self._under_way.append((self._start(numbers), numbers))

    def _start(self, numbers: Sequence[float]) -> tuple[torch.Tensor, dist.Work]:
        # Each rank tells each other rank. An all-reduce along a ring would take the latency of the links twice for each
        # rank: between two sites of four ranks, 20 ms apart, 0.3 s, and with that all plans seemed equally fast.
        own = torch.tensor(numbers, dtype=torch.float64).repeat(dist.get_world_size(self._group), 1)
        found = torch.empty_like(own)
        work = dist.all_to_all_single(found, own, group=self._group, async_op=True)
        assert work is not None
        return found, work

    @property
    def under_way(self) -> int:
        """Number of times that were shared and not yet taken."""
        return len(self._under_way)

    def take(self) -> PassTimes:
        """The earliest times that were shared and not yet taken; collective.

        Returns:
            Times whose `PassTimes.period` is the mean of the ranks (see `lightning_autosync.step_times.job_steps`)
            without the delay of the rank that had most, because all ranks wait for it. It is no less than the least
            period of a rank. Passes that overlap wait for a delayed rank one pass later, so each rank's own delay is
            left out of them. The other times are the largest.

        Raises:
            ExchangeError: a rank was lost, did not answer in time, or has chosen another plan.
        """
        carrier, numbers = self._under_way.popleft()
        if isinstance(carrier, Notes) and carrier.travelled:
            found = carrier.of_ranks()
        else:  # a message does not travel in a pass in which all its parameters are frozen, on all ranks
            exchanged, work = self._start(numbers) if isinstance(carrier, Notes) else carrier
            work.wait()
            found = exchanged.tolist()
        wholes, unusuals, *others = zip(*found, strict=True)
        compute, choice, present, least_choice, least_present, opening, priced = map(max, others)
        if (choice, present) != (-least_choice, -least_present):
            decided = round(numbers[3]), round(numbers[4])
            raise ExchangeError(
                f"tuning: ranks chose different plans for the same step ({self._told(decided)}). This is a fault of "
                "lightning-autosync: train with tuning='off', and report it"
            )
        self.opening, self.priced = bool(opening), bool(priced)
        unusual = max(unusuals)
        return PassTimes(self._period(wholes, unusuals) + unusual, unusual, compute)

    def _period(self, wholes: Sequence[float], unusuals: Sequence[float]) -> float:
        """The mean period of the ranks with these times; it is above 0."""
        usual = [whole - unusual for whole, unusual in zip(wholes, unusuals, strict=True)]
        # All ranks have to get the same number, so it must not depend on an order of additions.
        if self._overlaps:
            return math.fsum(usual) / len(usual)
        return max(math.fsum(wholes) / len(wholes) - max(unusuals), min(usual))

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
