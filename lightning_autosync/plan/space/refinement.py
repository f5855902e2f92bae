"""`Refinement`: local moves between plans, by message and by variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec, server_shares
from lightning_autosync.plan.spec import Group, Partition, SyncPlan
from lightning_autosync.plan.topologies import find
from lightning_autosync.workload import Workload

_CUTS = 8
"""Number of parts, about equal in bytes, between which a message may be cut; with few variables any cut is allowed."""

Groups = list[Group]
Move = Callable[[Groups, int], Iterator[Groups]]


class Refinement:
    """Moves between plans that a `PlanSpace` cannot express, because its blocks share their choices.

    A move does one of these: cut a message in two, join it with the next one, shift a variable to a neighbouring
    message, copy the settings of another message, change the servers, or toggle the priority on the wire. The resulting
    plan may fail to compile.

    Args:
        workload: the variables.
    """

    def __init__(self, workload: Workload, cluster: ClusterSpec) -> None:
        self._variables = {variable.name: variable for variable in workload.variables}
        self._place = {name: number for number, name in enumerate(workload.ready_order)}
        self._cluster = cluster
        self._moves: tuple[Move, ...] = (self._cut, self._join, self._shift, self._adopt, self._serve, self._urge)

    def neighbours(self, plan: SyncPlan) -> Iterator[SyncPlan]:
        """Every plan that is one move away."""
        groups = list(plan.groups)
        for index in range(len(groups)):
            for move in self._moves:
                for made in move(groups, index):
                    yield _with_groups(plan, made)

    def draw(self, plan: SyncPlan, rng: Random) -> SyncPlan | None:
        """A random plan one move away, with equal chances for all messages and kinds of moves; None if none exists."""
        groups = list(plan.groups)
        ways = [(move, index) for move in self._moves for index in range(len(groups))]
        for move, index in rng.sample(ways, len(ways)):
            if found := list(move(groups, index)):
                return _with_groups(plan, rng.choice(found))
        return None

    def _cut(self, groups: Groups, index: int) -> Iterator[Groups]:
        """Cut a message in two between variables, in backward order."""
        names = self._ordered(groups[index].variables)
        for place in self._cuts(names):
            halves = [_with(groups[index], names[:place]), _with(groups[index], names[place:])]
            yield [*groups[:index], *halves, *groups[index + 1 :]]

    def _join(self, groups: Groups, index: int) -> Iterator[Groups]:
        """Join a message with the next one of its element type, with the settings of either."""
        other = self._next(groups, index)
        if other is None:
            return
        names = self._ordered((*groups[index].variables, *groups[other].variables))
        joined = {_travel(group): _with(group, names) for group in (groups[index], groups[other])}
        for group in joined.values():
            yield [*groups[:index], *groups[index + 1 : other], group, *groups[other + 1 :]]

    def _shift(self, groups: Groups, index: int) -> Iterator[Groups]:
        """Move the last variable to the next message of its element type, or that message's first variable here."""
        other = self._next(groups, index)
        if other is None:
            return
        one, two = self._ordered(groups[index].variables), self._ordered(groups[other].variables)
        for here, there in ((one[:-1], (one[-1], *two)), ((*one, two[0]), two[1:])):
            if here and there:
                made = list(groups)
                made[index], made[other] = _with(groups[index], here), _with(groups[other], there)
                yield made

    def _adopt(self, groups: Groups, index: int) -> Iterator[Groups]:
        """Give a message the settings of another message of its kind (dense or row-wise)."""
        dense = self._dense(groups[index])
        ways = dict.fromkeys(_travel(group) for group in groups if self._dense(group) == dense)
        for way in ways:
            if way != _travel(groups[index]):
                yield _replaced(groups, index, _with(way, groups[index].variables))

    def _serve(self, groups: Groups, index: int) -> Iterator[Groups]:
        """Change the servers to a single rank, all ranks equally, or all ranks in proportion to their links."""
        group = groups[index]
        if group.architecture != "parameter_server":
            return
        ranks = tuple(range(self._cluster.world_size))
        ways: list[dict[str, Any]] = [{"placement": (rank,), "partition": None} for rank in ranks]
        ways.append({"placement": ranks, "partition": Partition(shards=len(ranks))})
        if self._cluster.measured:
            shares = tuple(server_shares(self._cluster))
            ways.append({"placement": ranks, "partition": Partition(shards=len(ranks), weights=shares)})
        for way in ways:
            made = group.model_copy(update=way)
            if made != group:
                yield _replaced(groups, index, made)

    def _urge(self, groups: Groups, index: int) -> Iterator[Groups]:
        """Toggle a message's priority on the wire, which is higher towards the front of the model."""
        group = groups[index]
        if find(group.topology).segmented:
            priority = 0 if group.priority else index + 1
            yield _replaced(groups, index, group.model_copy(update={"priority": priority}))

    def _next(self, groups: Groups, index: int) -> int | None:
        """The next message with which a message may exchange variables; None if there is none."""
        if not self._dense(groups[index]):
            return None
        kind = self._kind(groups[index])
        return next((place for place in range(index + 1, len(groups)) if self._kind(groups[place]) == kind), None)

    def _kind(self, group: Group) -> tuple[str, str]:
        first = self._variables[group.variables[0]]
        return first.kind, first.dtype

    def _dense(self, group: Group) -> bool:
        return self._kind(group)[0] == "dense"

    def _ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self._place.__getitem__))

    def _cuts(self, names: Sequence[str]) -> list[int]:
        if len(names) <= _CUTS:
            return list(range(1, len(names)))
        whole = sum(self._variables[name].bytes for name in names)
        found, passed = set(), 0
        for place, name in enumerate(names[:-1], 1):
            before, passed = passed, passed + self._variables[name].bytes
            if _CUTS * before // whole != _CUTS * passed // whole:
                found.add(place)
        return sorted(found)


def _with_groups(plan: SyncPlan, groups: Groups) -> SyncPlan:
    """The plan with these messages, named by their order."""
    named = [
        group.model_copy(update={"name": group.variables[0] if len(group.variables) == 1 else f"message {number}"})
        for number, group in enumerate(groups)
    ]
    return plan.model_copy(update={"groups": tuple(named)})


def _travel(group: Group) -> Group:
    """The settings of a group alone, without its name and its variables."""
    return _with(group, ()).model_copy(update={"name": ""})


def _with(group: Group, variables: Sequence[str]) -> Group:
    """A message with other variables and the same settings. It is cut flat, because they may lack the cut axis."""
    partition = group.partition
    if partition is not None and partition.axis is not None:
        partition = partition.model_copy(update={"axis": None})
    return group.model_copy(update={"variables": tuple(variables), "partition": partition})


def _replaced(groups: Groups, index: int, group: Group) -> Groups:
    return [*groups[:index], group, *groups[index + 1 :]]
