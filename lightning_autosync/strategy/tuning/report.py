"""What a job that tunes itself has found so far, for its user."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autosync.engine.tracing import StepTrace
from lightning_autosync.errors import needed_for
from lightning_autosync.plan import Schedule
from lightning_autosync.replay import Constants
from lightning_autosync.strategy.shares.cuts import SharesOfRanks

if TYPE_CHECKING:
    from lightning_autosync.strategy.resolution import Resolution
    from lightning_autosync.strategy.tuning.step_meter import StepFigures


_LARGEST_SHARE = 1.1
"""Largest share of the speed bound at which rates of links are not doubted. Medians of few steps do not add up, so it
may be somewhat above 1."""


@dataclass(frozen=True)
class TrialReport:
    """One comparison of two plans on training steps.

    Attributes:
        plan: fingerprint of the plan that was tried.
        name: its name.
        against: fingerprint of the plan that it was compared with.
        speedup: median step time of ``against``, divided by that of the plan.
        seconds: median step time of the plan.
        steps: synchronized steps of ``against`` and of the plan.
        accepted: whether the plan replaced the other.
    """

    plan: str
    name: str
    against: str
    speedup: float
    seconds: float
    steps: tuple[int, int]
    accepted: bool

    def __str__(self) -> str:
        return (
            f"tried {self.name} (plan {self.plan}): {self.speedup:.2f}x as fast as plan {self.against} over "
            f"{sum(self.steps)} steps, {'kept' if self.accepted else 'not kept'}"
        )


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps that a job measured, because `SyncMonitor` or another caller of `step_figures` asked for their times.

    Attributes:
        rank: the rank that measured them.
        history: number of steps so far, and figures of the steps since the entry before.
        trace: times of a typical step.
        schedule: the schedule by which it was synchronized.
    """

    rank: int
    history: Sequence[tuple[int, StepFigures]]
    trace: StepTrace
    schedule: Schedule


@dataclass(frozen=True)
class TuningReport:
    """How a job synchronizes, and why.

    Attributes:
        plan: fingerprint of the plan in use.
        reason: why it was chosen before the first step.
        links: number of hosts, and how their links are known; empty if links were not needed.
        candidates: names of the plans that could be tried, with their predicted seconds, None if unknown.
        trials: comparisons so far.
        tuning: state of the tuning in words.
        checks: later measurements of the links, for which training paused: why, and what they found.
        resolution: the plan with its workload and cluster, for pages.
        constants: costs of the hosts, for predictions on pages.
        measured: measured steps, for pages; None if no steps were measured.
        batch_shares: shares of global batches, in the order in which they held; empty without batch shares.
        overlaps: whether steps under the plan in use overlap with the next forward pass, as far as the model and its
            optimizers allow; None without ``overlap="step"``.
    """

    plan: str
    reason: str
    links: str
    candidates: Sequence[tuple[str, float | None]]
    trials: Sequence[TrialReport]
    tuning: str
    resolution: Resolution = field(repr=False, compare=False)
    constants: Constants = field(repr=False, compare=False)
    measured: MeasuredSteps | None = field(default=None, repr=False, compare=False)
    checks: Sequence[str] = ()
    batch_shares: Sequence[SharesOfRanks] = ()
    overlaps: bool | None = None

    @property
    def overlap(self) -> str:
        """Whether steps overlap, in words; empty without ``overlap="step"``."""
        if self.overlaps is None:
            return ""
        return "with the next forward pass" if self.overlaps else "none: steps wait at the end of the backward pass"

    @property
    def rates_fault(self) -> str:
        """Why the known rates of the links are too low, as measured steps show; empty if they do not show it."""
        entries = [] if self.measured is None else [figures.share_of_bound for _, figures in self.measured.history]
        shares = [share for share in entries if share is not None]
        if not shares or (share := statistics.median(shares)) <= _LARGEST_SHARE:
            return ""
        return (
            f"too low: steps are {share:.2f}x as fast as any exact plan could make them on such links; if you "
            "described the cluster, correct its rates, or give none, so that the job measures its links"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, without ``resolution``, ``constants`` and ``measured``."""
        return {
            "plan": self.plan,
            "reason": self.reason,
            "links": self.links,
            "candidates": list(self.candidates),
            "trials": [asdict(trial) for trial in self.trials],
            "tuning": self.tuning,
            "checks": list(self.checks),
            "batch_shares": [asdict(each) for each in self.batch_shares],
            "overlaps": self.overlaps,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML page, with pictures of the plan, the links, and measured and predicted steps.

        Raises:
            MissingPackageError: a package of the extra ``report`` is not installed.
            UnwritableError: the file cannot be written.
        """
        with needed_for("The HTML page of a job"):  # late: training imports no matplotlib
            from lightning_autosync.strategy.tuning.page import write_page

            write_page(self, Path(path))

    def __str__(self) -> str:
        lines = [f"plan {self.plan}: {self.reason}"]
        if self.overlap:
            lines.append(f"overlap: {self.overlap}")
        if self.links:
            lines.append(f"links: {self.links}")
        if self.rates_fault:
            lines.append(f"rates of links: {self.rates_fault}")
        lines += [*map(str, self.trials), *self.checks, *(f"batch shares {each}" for each in self.batch_shares)]
        lines.append(f"tuning: {self.tuning}")
        return "\n".join(lines)
