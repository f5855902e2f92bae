"""Runs pairs of jobs on live processes, and says of each pair how it ended."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autosync.measure.workers import WorkerError, WorkerPool
from parity.case import Case
from parity.listed import reason_for

TESTS = Path(__file__).parents[1]
TOLERANCE = 1e-6
LONGEST = 120.0
"""Seconds after which a job is taken to hang."""

DDP = "ddp"
EQUAL, RAISED, LISTED, DIFFERENT = "equal", "both raise", "listed", "different"


@dataclass(frozen=True)
class Verdict:
    """How one pair ended.

    Attributes:
        ending: `EQUAL`, `RAISED`, `LISTED` or `DIFFERENT`.
        gap: the largest relative difference of anything noted.
        told: where it is, or what was raised, or why the pair is listed.
    """

    case: Case
    plan: str
    ending: str
    gap: float
    told: str


def _on_a_side(function: str, arguments: dict[str, Any]) -> Any:
    """In a worker: call a function of `parity.side`, whose import changes the process that it is in."""
    from parity import side

    return getattr(side, function)(**arguments)


class Crew:
    """Two live ranks, started again if a job breaks them."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def run(self, function: str, **arguments: Any) -> list[Any]:
        if self._pool is None or self._pool.closed:
            paths = [TESTS, TESTS / "strategy"]
            self._pool = WorkerPool(2, timeout=LONGEST, extra_paths=paths, scheduling="batch")
        found: list[Any] = self._pool.run(_on_a_side, function=function, arguments=arguments)
        return found

    def renew(self) -> None:
        """A job raised, perhaps in the middle of a collective: the ranks meet in a new process group."""
        with suppress(WorkerError):
            self.run("renew")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@contextmanager
def crew() -> Iterator[Crew]:
    found = Crew()
    try:
        yield found
    finally:
        found.close()


def pairs(
    cases: Iterable[Case], ranks: Crew, plans: Iterable[str] | None = None, tell: Callable[[str], None] | None = None
) -> Iterator[Verdict]:
    """Run DDP's job of each case once, then AutoSync's under each of its plans.

    Args:
        cases: to run.
        ranks: who runs them.
        plans: only these, where a case has them.
        tell: called with the name of each job that begins.
    """
    for case in cases:
        chosen = [plan for plan in case.plans if plans is None or plan in plans]
        with tempfile.TemporaryDirectory() as folder:
            if not chosen:
                continue
            if tell is not None:
                tell(case.name)
            theirs = _job(case, DDP, folder, ranks)
            for plan in chosen:
                ours = theirs if theirs["lost"] else _job(case, plan, folder, ranks)
                yield _judge(case, plan, theirs, ours, ranks)


def _job(case: Case, plan: str, folder: str, ranks: Crew) -> dict[str, Any]:
    """The errors of both ranks (empty where there was none), how much was noted, and whether the ranks were lost."""
    own = Path(folder) / plan
    own.mkdir()
    try:
        found = ranks.run("run", case=case.name, plan=plan, folder=str(own))
    except WorkerError as error:
        return {"errors": [f"WorkerError: {error}"], "wrong": True, "noted": 0, "lost": True}
    errors = [each["error"] for each in found if each["error"]]
    if errors:
        ranks.renew()
    return {
        "errors": errors,
        "wrong": any(each["wrong"] for each in found),
        "noted": min(each["noted"] for each in found),
        "lost": False,
    }


def _judge(case: Case, plan: str, theirs: dict[str, Any], ours: dict[str, Any], ranks: Crew) -> Verdict:
    ending, gap, told = _compare(case, plan, theirs, ours, ranks)
    reason = reason_for(case.name, plan)
    if reason is not None:
        # A listed pair that has become equal must leave the list.
        return Verdict(case, plan, LISTED if ending == DIFFERENT else DIFFERENT, gap, reason)
    return Verdict(case, plan, ending, gap, told)


def _compare(
    case: Case, plan: str, theirs: dict[str, Any], ours: dict[str, Any], ranks: Crew
) -> tuple[str, float, str]:
    first, second = (side["errors"][0] if side["errors"] else "" for side in (theirs, ours))
    if theirs["wrong"] or ours["wrong"] or bool(first) != bool(second):
        return DIFFERENT, float("inf"), f"DDP: {_line(first) or 'ends'}; AutoSync: {_line(second) or 'ends'}"
    if bool(first) != bool(case.raises) or case.raises not in first:
        return DIFFERENT, float("inf"), f"the case itself is wrong: DDP: {_line(first) or 'ends'}"
    if first:
        return RAISED, 0.0, f"DDP: {_line(first)}; AutoSync: {_line(second)}"
    if not theirs["noted"]:
        return DIFFERENT, float("inf"), "the case itself is wrong: nothing was noted"
    found = ranks.run("compare", plan=plan)
    worst = max(found, key=lambda each: float(each["gap"]))
    return (EQUAL if worst["gap"] < TOLERANCE else DIFFERENT), worst["gap"], worst["where"]


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
