"""What a pair of jobs is: one function that both strategies run, and the plans that AutoSync runs it by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.side import Side

PAIR = {"format": "autosync-cluster/1", "name": "pair", "uniform": {"nodes": 2, "bandwidth": "1 Gbit/s"}}

PLANS: dict[str, dict[str, Any] | str] = {
    "default": "autosync",
    "native": "autosync_allreduce",
    "servers": "autosync_ps",
    "ring": {"plan": "ring"},
    "trees": {"plan": "packed_trees", "cluster": PAIR},
}
"""Name of a plan, and the strategy's registered name or its arguments. ``default`` sums in shared memory here."""

ALL = tuple(PLANS)
FEW = ("default", "ring")
"""For cases in which little depends on how gradients travel."""


@dataclass(frozen=True)
class Case:
    """A job, to be run under DDP and under AutoSync.

    Attributes:
        name: unique.
        family: the row of the table that it counts in.
        run: the job, which trains, and notes what must be equal.
        plans: names in `PLANS` that AutoSync runs it by.
        raises: a part of the error that both must raise; empty if none.
        reference: what DDP has to be told that AutoSync need not know, as arguments of ``DDPStrategy``.
        options: arguments that both strategies get.
    """

    name: str
    family: str
    run: Callable[[Side], Any]
    plans: tuple[str, ...]
    raises: str
    reference: dict[str, Any]
    options: dict[str, Any]


class Family:
    """Collects the cases of one row of the table."""

    def __init__(self, name: str, plans: Sequence[str] = ALL) -> None:
        self.name, self.plans = name, tuple(plans)
        self.cases: list[Case] = []

    def add(
        self,
        name: str,
        run: Callable[[Side], Any],
        raises: str = "",
        unused: bool = False,
        plans: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Add a case; ``unused`` makes the reference ``ddp_find_unused_parameters_true``."""
        reference = {"find_unused_parameters": True} if unused else {}
        self.cases.append(
            Case(name, self.name, run, self.plans if plans is None else tuple(plans), raises, reference, options)
        )

    def __call__(self, **settings: Any) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
        """Decorates a job; the case is named by the function."""

        def register(run: Callable[[Side], Any]) -> Callable[[Side], Any]:
            self.add(run.__name__.strip("_").replace("_", " "), run, **settings)
            return run

        return register
