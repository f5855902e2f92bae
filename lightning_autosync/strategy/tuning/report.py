"""What a job that tunes itself has found so far, for its user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


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


@dataclass(frozen=True)
class TuningReport:
    """How a job synchronizes, and why.

    Attributes:
        plan: fingerprint of the plan in use.
        reason: why it was chosen before the first step.
        links: number of hosts, and how their links are known; empty if links were not needed.
        candidates: names of the plans that could be tried, with their predicted seconds.
        trials: comparisons so far.
        tuning: state of the tuning in words.
    """

    plan: str
    reason: str
    links: str
    candidates: Sequence[tuple[str, float]]
    trials: Sequence[TrialReport]
    tuning: str

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"plan {self.plan}: {self.reason}"]
        if self.links:
            lines.append(f"links: {self.links}")
        for trial in self.trials:
            verdict = "kept" if trial.accepted else "not kept"
            lines.append(
                f"tried {trial.name} (plan {trial.plan}): {trial.speedup:.2f}x as fast as plan {trial.against} over "
                f"{sum(trial.steps)} steps, {verdict}"
            )
        lines.append(f"tuning: {self.tuning}")
        return "\n".join(lines)
