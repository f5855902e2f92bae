"""`Sample`: one measured plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import LEAST, LONGEST
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload

_TIMES = f"it must be finite and above 0 seconds, from {LEAST:g} to {LONGEST:g}"


@dataclass(frozen=True)
class Sample:
    """The step times of a plan for a workload on a cluster.

    Attributes:
        workload: what was synchronized.
        cluster: the machines, as emulated or real.
        plan: how.
        steps: seconds of each measured step, of the slowest rank; at least one.
        kind: how the plan came about: the name of a builder, ``drawn``, ``evolved`` ...
        replayed: seconds of a step as the replay prices it with the constants of the time; None if it did not.
        environment: fingerprint of what it was measured on; None where that is the same for all.
        reference: seconds of a step of the pair's reference plan, measured again just before the batch of plans that
            this one came in, whose samples have it in common; None if it was not measured.

    Raises:
        ValueError: `check_steps` refuses the steps, or the reference is no time either.
    """

    workload: Workload
    cluster: ClusterSpec
    plan: SyncPlan
    steps: tuple[float, ...]
    kind: str = "drawn"
    replayed: float | None = None
    environment: str | None = field(default=None, compare=False)
    reference: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_steps(self.steps)
        for name, seconds in (("replayed", self.replayed), ("reference", self.reference)):
            if seconds is not None and not is_time(seconds):
                raise ValueError(f"{name}: {seconds} is not a time; {_TIMES}")

    @cached_property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @cached_property
    def noise(self) -> float:
        """Standard error of `seconds` over `seconds`, from the median absolute deviation; 0 with a single step."""
        return step_noise(self.steps)


def is_time(seconds: float) -> bool:
    """Whether a number of seconds can be that of a step."""
    return LEAST <= seconds <= LONGEST


def check_steps(steps: Sequence[float | None]) -> None:
    """Refuse what cannot be the seconds of measured steps: there is at least one, and each is finite and above 0.

    Raises:
        ValueError: the first thing wrong.
    """
    if not steps:
        raise ValueError("steps: none; a sample has at least one")
    for number, seconds in enumerate(steps):
        if seconds is None or not is_time(seconds):
            raise ValueError(f"steps[{number}]: {seconds} is not a time; {_TIMES}")


def step_noise(steps: Sequence[float]) -> float:
    """The noise of a sample of those steps (see `Sample.noise`)."""
    if len(steps) < 2:
        return 0.0
    median = statistics.median(steps)
    deviation = statistics.median(abs(step - median) for step in steps)
    return 1.4826 * 1.2533 * deviation / len(steps) ** 0.5 / median
