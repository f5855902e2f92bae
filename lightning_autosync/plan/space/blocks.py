"""Blocks: variables of like size and position, which share their choices in a `PlanSpace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_autosync.workload import Variable, Workload

LARGE_SHARE = 0.08
"""Share of all bytes from which on a variable is worth choices of its own."""


@dataclass(frozen=True)
class Block:
    """Variables that are decided on together.

    Attributes:
        name: ``run0``, ``run1``, ... in the order of backward, or the name of a lone variable.
        variables: in the order in which backward makes their gradients; of one element type.
        home: the run that it may join: for a large dense variable the one at its position, for a run the one before
            it in backward; None where there is none of its element type.
    """

    name: str
    variables: tuple[Variable, ...]
    home: str | None = None

    @property
    def bytes(self) -> int:
        return sum(variable.bytes for variable in self.variables)

    @property
    def dense(self) -> bool:
        return self.variables[0].kind == "dense"


def make_blocks(workload: Workload, runs: int = 4, lone: int = 6) -> tuple[Block, ...]:
    """Cut a workload into at most ``runs`` runs an element type, ``lone`` large variables and its row-wise ones.

    Runs hold about equal bytes, in the order of backward. Large variables are those above `LARGE_SHARE` of all
    bytes, the largest first.
    """
    order = [workload.variable(name) for name in workload.ready_order]
    dense = [variable for variable in order if variable.kind == "dense"]
    large = sorted((v for v in dense if v.bytes >= LARGE_SHARE * workload.bytes), key=lambda v: -v.bytes)[:lone]
    alone = {variable.name for variable in large}
    made: list[Block] = []
    for dtype in dict.fromkeys(variable.dtype for variable in dense):
        made += _runs([variable for variable in dense if variable.dtype == dtype], alone, runs, len(made))
    return (*made, *(Block(v.name, (v,)) for v in order if v.kind != "dense"))


def _runs(variables: Sequence[Variable], alone: set[str], runs: int, first: int) -> Iterator[Block]:
    """Blocks of one element type: its runs, then the large variables that could join one of them."""
    small = sum(variable.bytes for variable in variables if variable.name not in alone)
    members: list[list[Variable]] = [[] for _ in range(runs)]
    homes: dict[str, int] = {}
    seen = 0
    for variable in variables:
        place = min(runs - 1, runs * seen // small) if small else 0
        if variable.name in alone:
            homes[variable.name] = place
        else:
            members[place].append(variable)
            seen += variable.bytes
    names = {place: f"run{first + number}" for number, place in enumerate(p for p in range(runs) if members[p])}
    before: str | None = None
    for place, name in names.items():
        yield Block(name, tuple(members[place]), before)
        before = name
    for variable in variables:
        if variable.name in alone:
            yield Block(variable.name, (variable,), names.get(homes[variable.name]))
