"""Periodic averaging: all workers average after some local steps, and an outer update computes the next model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_autosync.plan import Consistency
from lightning_autosync.relaxed.averaging_worker import AveragingWorker
from lightning_autosync.relaxed.controller import RANK
from lightning_autosync.relaxed.coordinator import Coordinator
from lightning_autosync.relaxed.grouping import AdaptivePeriod, Grouping, IsolationGuard
from lightning_autosync.relaxed.model_state import FlatView, ModelTensors, flat_type
from lightning_autosync.relaxed.outer_updates import make_outer
from lightning_autosync.relaxed.transport.mesh import Mesh


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut a list of tensors into contiguous fragments with about equal numbers of elements.

    Args:
        sizes: number of elements of each tensor.
        fragments: number of fragments; reduced to the number of tensors if there are fewer.

    Returns:
        A range of positions for each fragment; none is empty unless there are no tensors.
    """
    fragments = max(1, min(fragments, len(sizes)))
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    bounds = [0]
    for fragment in range(1, fragments):
        target = sum(sizes) * fragment / fragments
        cut = sum(middle < target for middle in middles)
        bounds.append(min(max(cut, bounds[-1] + 1), len(sizes) - fragments + fragment))
    return [range(begin, end) for begin, end in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


def first_ages(fragments: int, period: int) -> list[int]:
    """Initial steps since the last average, by fragment, chosen so that their averages are spread over the period."""
    return [(fragments - 1 - fragment) * period // fragments for fragment in range(fragments)]


LONGEST = 10_000
"""Largest number of steps of an adapting period."""
_LONGEST_SILENCE = 5.0
"""Seconds between reports of progress within a period, unless a quarter of the time-out is less."""


class Periodic(AveragingWorker):
    """A worker of periodic averaging: local SGD, post-local SGD, EASGD, BMUF, SlowMo, DiLoCo, and DiLoCo by fragments.

    A drain is a plain average without an outer update, and the next period begins there. Choose a period that divides
    the number of steps between drains. A longer period makes no outer updates, which is warned about. Once a worker has
    no more data, the others average without outer updates until the drain. Outer momentum is kept across drains.

    Args:
        mesh: connects the workers, which are all its ranks; owned by the caller.
        settings: a consistency of mode ``periodic``.
        model, timeout, stall: as of `AveragingWorker`.
    """

    def __init__(
        self, mesh: Mesh, model: ModelTensors, settings: Consistency, *, timeout: float = 1800.0, stall: float = 60.0
    ) -> None:
        assert settings.period is not None
        coordinator = None
        if mesh.rank == RANK:
            period = AdaptivePeriod(settings.period, settings.overhead, LONGEST) if settings.overhead else None
            grouping = Grouping(None, isolation=IsolationGuard(None))
            coordinator = Coordinator(mesh.size, grouping, atomic=True, timeout=timeout, period=period)
        super().__init__(mesh, model, coordinator, timeout, stall, settings.momentum == "average")
        self._period, self._adapts = settings.period, settings.overhead is not None
        self._warmup = settings.warmup or 0
        sizes = FlatView(model.parameters).sizes
        self._fragments = [
            [model.parameters[place] for place in places] for places in cut_fragments(sizes, settings.fragments or 1)
        ]
        # One dtype for all fragments, so that several fit in one message.
        self._dtype = flat_type(model.parameters)
        shapes = [FlatView(fragment).sizes for fragment in self._fragments]
        self._sizes = [sum(each) for each in shapes]
        self._outer = [make_outer(settings, each, self._dtype) for each in shapes]
        self._ages = first_ages(len(self._fragments), self._period)
        self._outer_name = settings.outer
        self._updated: set[int] = set()
        """Indices of the fragments with an outer update since the last drain."""
        self._warned = False
        self._loaded = False
        self._clock = _Clock()
        self._reported = time.monotonic()

    def start(self) -> None:
        if not self._loaded:
            for fragment, outer in zip(self._fragments, self._outer, strict=True):
                outer.begin(FlatView(fragment).pack().to(self._dtype))
        super().start()
        self._clock.restart()

    def step(self, optimizer: Optimizer, samples: int) -> None:
        self._step_locally(optimizer, samples)
        self._ages = [age + 1 for age in self._ages]
        self._clock.steps += 1
        warming = self._iteration <= self._warmup
        due = [index for index, age in enumerate(self._ages) if warming or age >= self._period]
        if due:
            self._average_fragments(due, optimizer, warming)
        else:
            self._report()

    def _report(self) -> None:
        """Tell the coordinator from time to time that this worker makes steps, because others may wait for it."""
        now = time.monotonic()
        if now - self._reported >= min(_LONGEST_SILENCE, self._timeout / 4):
            self._reported = now
            self._client.send("progress")

    def _average_fragments(self, due: list[int], optimizer: Optimizer, warming: bool) -> None:
        parameters = [parameter for index in due for parameter in self._fragments[index]]
        facts = self._momentum_facts(parameters)
        facts |= {"due": due, "rates": _rates(optimizer, parameters), **self._clock.facts()}

        def view(group: dict[str, Any]) -> FlatView:
            return FlatView([*parameters, *self._momenta(parameters, group["averages"])])

        def pack(group: dict[str, Any]) -> Tensor:
            return view(group).pack().to(self._dtype)

        elements = sum(self._sizes[index] for index in due)
        group, mean = self._average_with_group("ready", elements, pack, **facts)
        local = FlatView(parameters).pack().to(self._dtype)
        result = mean.clone()
        begin = first = 0
        for index in due:
            outer, part = self._outer[index], slice(begin, begin + self._sizes[index])
            rates = group["rates"][first : first + len(self._fragments[index])]
            begin, first = part.stop, first + len(rates)
            if warming:
                outer.begin(mean[part])
            elif group["whole"]:
                result[part] = outer.update(local[part], mean[part], len(group["members"]), rates)
                self._updated.add(index)
            else:
                # An update from some replicas' progress would be another one than that of the replicas that have ended.
                outer.settle(mean[part])
            self._ages[index] = 0
        view(group).unpack(result)
        if warming:
            self._ages = first_ages(len(self._fragments), self._period)
        self._iteration = group["iteration"]
        self._period = group.get("period", self._period)
        self._clock.exchanged()

    def _drained_state(self) -> list[Tensor]:
        return [tensor for outer in self._outer for tensor in outer.state.values()]

    def _after_drain(self, group: dict[str, Any]) -> None:
        self._warn_of_a_long_period(first_ages(len(self._fragments), self._period))
        # A worker without data took no part in the last averages, which may have changed the period.
        self._period = group.get("period", self._period)
        self._updated.clear()
        for fragment, outer in zip(self._fragments, self._outer, strict=True):
            outer.settle(FlatView(fragment).pack().to(self._dtype))
        self._ages = first_ages(len(self._fragments), self._period)
        self._clock.restart()

    def _warn_of_a_long_period(self, begun: list[int]) -> None:
        """Warn once, on rank 0, if a fragment has made steps since the last drain, but no outer update.

        Args:
            begun: ages of the fragments at the last drain.
        """
        waiting = any(
            age > first and index not in self._updated
            for index, (age, first) in enumerate(zip(self._ages, begun, strict=True))
        )
        # With plain averaging nothing is missed, because a drain does the same.
        if not waiting or self._warned or self._mesh.rank != RANK or self._outer_name == "averaging":
            return
        self._warned = True
        warnings.warn(
            f"consistency.period: all replicas met before a period of {self._period} steps was over, as at the end of "
            f"an epoch. They were averaged without the outer update ('{self._outer_name}'), and a new period began; "
            "choose a period that divides the number of steps from one such time to the next",
            stacklevel=2,
        )

    def _own_state(self) -> dict[str, Any]:
        if self._mesh.rank != RANK:
            return {"period": self._period}  # at the start, other ranks get the outer state from rank 0
        outer = [{name: tensor.clone() for name, tensor in update.state.items()} for update in self._outer]
        return {"period": self._period, "outer": outer}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        if self._adapts:
            self._period = state["period"]
        self._ages = first_ages(len(self._fragments), self._period)
        if "outer" in state:
            self._load_outer(state["outer"])

    def _load_outer(self, given: list[dict[str, Tensor]]) -> None:
        kept = [update.state for update in self._outer]
        if _shapes(kept) != _shapes(given):
            warnings.warn(
                "the checkpoint's outer state does not match consistency.outer or consistency.fragments; the outer "
                "state is reset",
                stacklevel=2,
            )
            return
        for own, values in zip(kept, given, strict=True):
            for name, tensor in values.items():
                own[name].copy_(tensor)
        self._loaded = True

    def _rejoin_state(self, steps_back: int) -> tuple[dict[str, Any], list[Tensor]]:
        ages = [age - steps_back for age in self._ages]
        return {"period": self._period, "ages": ages}, self._drained_state()

    def _load_rejoin_state(self, facts: dict[str, Any]) -> None:
        self._period, self._ages = facts["period"], list(facts["ages"])


def _rates(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[float]:
    """The learning rate of each parameter; 0 for one that the optimizer does not train, or without a rate."""
    rates = {id(one): float(group.get("lr", 0.0)) for group in optimizer.param_groups for one in group["params"]}
    return [rates.get(id(parameter), 0.0) for parameter in parameters]


def _shapes(states: list[dict[str, Tensor]]) -> list[dict[str, torch.Size]]:
    return [{name: tensor.shape for name, tensor in state.items()} for state in states]


class _Clock:
    """Times of local steps and of exchanges, for an adapting period."""

    def __init__(self) -> None:
        self.steps = 0
        self._since = time.monotonic()
        self._begun = self._since
        self._exchange = 0.0

    def restart(self) -> None:
        """Begin to measure steps, at the start or after time that does not count. The last exchange stays known."""
        self.steps, self._since = 0, time.monotonic()

    def facts(self) -> dict[str, float]:
        """Mean seconds per step since the last exchange, and the seconds of that exchange (0 if unknown)."""
        self._begun = time.monotonic()
        return {"step_time": (self._begun - self._since) / max(1, self.steps), "exchange_time": self._exchange}

    def exchanged(self) -> None:
        """End the exchange that began with :meth:`facts`."""
        now = time.monotonic()
        self._exchange, self._since, self.steps = now - self._begun, now, 0
