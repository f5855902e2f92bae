"""The mesh of a running job: this rank's coordinates and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.collectives import group_device
from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.plan import HybridPlan


@dataclass(frozen=True)
class MeshLine:
    """The ranks along one dimension of a mesh that include this rank.

    Attributes:
        group: their process group.
        order: rank in ``group`` for each position; None if they are equal. They may differ because process groups sort
            their ranks.
    """

    group: dist.ProcessGroup
    size: int
    order: tuple[int, ...] | None


class LiveMesh:
    """This rank's coordinates in the mesh of a plan, and its groups of ranks along the dimensions.

    Args:
        members: rank in the job of each of the plan's ranks; by default they are the same.

    Raises:
        PlanError: the plan is for another number of ranks.
    """

    def __init__(
        self, plan: HybridPlan, members: Sequence[int] | None = None, timeout: timedelta | None = None
    ) -> None:
        self.members = tuple(range(dist.get_world_size()) if members is None else members)
        if len(self.members) != plan.world_size:
            mesh = " x ".join(map(str, plan.mesh))
            raise PlanError(f"plan: mesh: {mesh} is {plan.world_size} ranks, but the job has {len(self.members)}")
        self._groups = mesh_groups(plan, self.members, timeout)
        self.rank = self.members.index(dist.get_rank())
        self.sizes: tuple[int, ...] = plan.mesh
        self.coordinates = plan.coordinates(self.rank)
        self._plan = plan
        self._lines: dict[int, MeshLine] = {}

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(range(len(self.sizes)))

    def size(self, dimensions: Sequence[int]) -> int:
        """Number of ranks that differ along these dimensions only."""
        return prod(self.sizes[k] for k in dimensions)

    def peers(self, dimensions: Sequence[int]) -> tuple[int, ...]:
        """The plan's ranks that differ from this one along these dimensions only, including this one."""
        return next(group for group in self._plan.groups(tuple(dimensions)) if self.rank in group)

    def group(self, dimensions: Sequence[int]) -> dist.ProcessGroup:
        """The process group of `peers`."""
        return self._groups[frozenset(dimensions)][self._place(dimensions)]

    def all_have(self, number: int) -> bool:
        """Whether the number is the same on all ranks; collective."""
        # The maximum of a number and that of its negative show it without a gather.
        device = group_device(self.group(self.dimensions))
        largest, negated = self.largest(torch.tensor([number, -number], device=device))
        return largest == -negated

    def largest(self, numbers: Tensor) -> list[int]:
        """The largest of all ranks' numbers in each place; collective, and it overwrites ``numbers``."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group(self.dimensions))
        found: list[int] = numbers.tolist()
        return found

    def _place(self, dimensions: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(self.members[rank] for rank in self.peers(dimensions)))

    def line(self, dimension: int) -> MeshLine:
        """The ranks along a dimension that include this rank."""
        if dimension not in self._lines:
            members = [self.members[rank] for rank in self.peers((dimension,))]
            order = tuple(self._place((dimension,)).index(member) for member in members)
            self._lines[dimension] = MeshLine(
                self.group((dimension,)),
                self.sizes[dimension],
                None if order == tuple(range(len(order))) else order,
            )
        return self._lines[dimension]


Groups = dict[frozenset[int], dict[tuple[int, ...], dist.ProcessGroup]]
"""For each set of dimensions, the process groups of ranks that differ only along these, by their ranks in the job."""


def mesh_groups(plan: HybridPlan, members: Sequence[int], timeout: timedelta | None = None) -> Groups:
    """The process groups that a plan needs; collective among all ranks of the job, including those without a place.

    Args:
        members: rank in the job of each of the plan's ranks.
    """
    found: Groups = {}
    # Sorted, because all ranks must create process groups in the same order.
    for dimensions in sorted(map(sorted, _needed(plan))):
        cosets = (tuple(sorted(members[rank] for rank in ranks)) for ranks in plan.groups(dimensions))
        found[frozenset(dimensions)] = {ranks: _group_of(ranks, timeout) for ranks in cosets}
    return found


def _needed(plan: HybridPlan) -> set[frozenset[int]]:
    """The sets of dimensions along which layouts change, or parameters have replicas or copies."""
    dimensions = range(len(plan.mesh))
    found = {frozenset(dimensions), *(frozenset({k}) for k in dimensions)}
    for layer in plan.layers:
        replicas = frozenset(k for k in dimensions if layer.signature[k] == "dp")
        # Layers that share a parameter may have replicas along other dimensions.
        found |= {replicas | other for other in found} | {replicas}
        # Copies of a parameter are compared. All of a layer's parameters lie whole along ``rep``, and a bias also where
        # only the weight is cut.
        whole = frozenset(k for k in dimensions if layer.signature[k] in ("dp", "rep"))
        found |= {whole, whole | {k for k in dimensions if layer.signature[k] in ("row", "heads")}}
    return found - {frozenset()}


def _group_of(ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    """The process group of some ranks of the job; cached, because the number of groups in a job is limited."""
    world = dist.group.WORLD
    assert world is not None
    if ranks == tuple(range(dist.get_world_size())):
        return world
    known = _GROUPS.setdefault(world, {})
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks), timeout=timeout)
    return known[ranks]


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
