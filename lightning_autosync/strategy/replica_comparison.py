"""Replicas begin equal. Whether they still are: they train the same parameters, and have the same weights."""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn

from lightning_autosync.engine.collectives import broadcast_tensors, gather_json, group_device
from lightning_autosync.engine.replicas import ParameterTracker, ReplicaCheck, difference, warn_of_shortened
from lightning_autosync.errors import PlanError
from lightning_autosync.workload import shared_buffers, shared_parameters, shortened_rows, variable_names

CALM = 100
"""Passes without a change after which ranks no longer compare their parameters before each pass."""


def follow_rank_zero(module: nn.Module, buffers: bool, group: dist.ProcessGroup | None = None) -> None:
    """Take the weights of rank 0, and with ``buffers`` its buffers; collective over ``group`` (None: the default)."""
    found = [parameter.data for _, parameter in shared_parameters(module)]
    broadcast_tensors(found + ([buffer.data for _, buffer in shared_buffers(module)] if buffers else []), group)


class ParameterComparison:
    """Compares which parameters the ranks train.

    Args:
        group: the ranks; None is the default group.

    Attributes:
        active: whether ranks compare before each pass, because there was a change a short while ago.
        alone: whether they may. Where a job has several modules, ranks may begin the passes of these in different
            orders, and would wait for each other.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._module = module
        self._group = group
        self._tracker = ParameterTracker(module)
        self._agreed = self._tracker.digest()
        self._calm = 0
        self.active, self.alone = False, True

    def changed(self) -> bool:
        """Whether this rank's parameters changed since ranks agreed on them."""
        return self._tracker.changed()

    def run(self) -> bool:
        """Compare digests; returns whether all ranks made a change. Collective.

        Raises:
            PlanError: (on every rank) parameters differ between ranks.
        """
        own = self._tracker.digest()
        # The maximum of the negated digests is the negated minimum, so one all-reduce compares them.
        extremes = torch.tensor([own, -own], dtype=torch.int64, device=group_device(self._group))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest != smallest:
            self._refuse_differences()
        self._calm = self._calm + 1 if own == self._agreed else 0
        self.active = self._calm < CALM
        return own != self._agreed

    def begin(self) -> None:
        """Compare after a pass before which some rank's parameters changed; if `alone`, also before each later pass.

        Collective.

        Raises:
            PlanError: (on every rank) parameters differ between ranks.
        """
        self._refuse_differences()
        self.active, self._calm = self.alone, 0

    def accept(self) -> list[nn.Parameter]:
        """Take this rank's parameters as those that ranks have agreed on.

        Returns:
            Those that were added, or replaced others, in the same order on all ranks.
        """
        new, present = self._tracker.replaced(), dict(shared_parameters(self._module))
        self._tracker.accept()
        self._agreed = self._tracker.digest()
        return [present[name] for name in new if name in present]

    def _refuse_differences(self) -> None:
        if found := difference(gather_json(self._tracker.facts(), self._group)):
            raise PlanError(
                f"model: {found}. Replicas would diverge: make the same change at the same step on all ranks"
            )


class WeightComparison:
    """Compares the weights of the ranks at regular intervals: those in the plan, and, more rarely, the frozen ones.

    Args:
        every: synchronized backward passes between comparisons; 0 never compares.
        group: the ranks; None is the default group.
    """

    def __init__(self, module: nn.Module, every: int, group: dist.ProcessGroup | None = None) -> None:
        self._module = module
        self._check = ReplicaCheck(every, group) if every else None
        self._planned: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}

    def choose(self, planned: Container[str]) -> None:
        """Choose the parameters that are compared, from the names of those in the plan."""
        found = dict(variable_names(self._module, also=set(self._module.parameters())))
        shortened = shortened_rows(self._module)
        if not self._planned:
            warn_of_shortened(name for name, parameter in found.items() if parameter in shortened)
        kept = {name: parameter for name, parameter in found.items() if parameter not in shortened}
        self._planned = {name: parameter for name, parameter in kept.items() if name in planned}
        self._frozen = {name: parameter for name, parameter in kept.items() if name not in planned}

    @property
    def is_due(self) -> bool:
        """Whether the next call of `count` compares weights."""
        return self._check is not None and self._check.is_due

    def count(self) -> None:
        """Count a synchronized backward pass, and compare if a comparison is due; collective.

        Backward passes are counted because all ranks make equally many of them, unlike forward passes.

        Raises:
            ExchangeError: (on every rank) weights differ.
        """
        if self._check is not None:
            self._check.count(self._planned, self._frozen)

    def run(self) -> None:
        """Compare all weights now; collective.

        Raises:
            ExchangeError: (on every rank) weights differ.
        """
        if self._check is not None:
            self._check.run({**self._planned, **self._frozen})
