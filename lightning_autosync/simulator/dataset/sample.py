"""`Sample`: one measured plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload


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
    """

    workload: Workload
    cluster: ClusterSpec
    plan: SyncPlan
    steps: tuple[float, ...]
    kind: str = "drawn"
    replayed: float | None = None
    environment: str | None = field(default=None, compare=False)

    @cached_property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @cached_property
    def noise(self) -> float:
        """Standard error of `seconds` over `seconds`, from the median absolute deviation; 0 with a single step."""
        return step_noise(self.steps)


def step_noise(steps: Sequence[float]) -> float:
    """The noise of a sample of those steps (see `Sample.noise`)."""
    if len(steps) < 2:
        return 0.0
    median = statistics.median(steps)
    deviation = statistics.median(abs(step - median) for step in steps)
    return 1.4826 * 1.2533 * deviation / len(steps) ** 0.5 / median
