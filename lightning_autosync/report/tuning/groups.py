"""Tuning runs sorted by what was tuned and by what sampler."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_autosync.report.tuning.run import TuningRun

CLOSE = 0.98
"""Share of the speed of the best known plan that counts as having found it."""


@dataclass(frozen=True)
class Range:
    """A median, and the least and the most of all values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Range | None:
        """Of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True)
class Case:
    """All runs for one workload on one cluster.

    Attributes:
        title: model and cluster, and what tells them apart from others of the same names.
        groups: by sampler.
    """

    title: str
    groups: tuple[Group, ...]

    @property
    def runs(self) -> list[TuningRun]:
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def best_known(self) -> float:
        """Most times as fast as its own best-tuned DDP that any run's best plan was measured; 0 if nothing was.

        Runs are not interleaved, so that their seconds compare with those of their own DDP only.
        """
        return max((course[-1] for group in self.groups for course in group.courses), default=0.0)

    def trials_to_close(self, run: TuningRun) -> int | None:
        """Trials until a run reached `CLOSE` of the speed of the best known plan; None if it never did."""
        for count, speed in enumerate(run.course, start=1):
            if speed > 0 and speed >= CLOSE * self.best_known:
                return count
        return None


@dataclass(frozen=True)
class Group:
    """Runs of one sampler for one workload on one cluster, which differ by their seeds."""

    sampler: str
    runs: tuple[TuningRun, ...]

    @property
    def courses(self) -> list[list[float]]:
        """[runs][trials] how many times as fast as its best-tuned DDP a run's best plan was; 0 before the first."""
        return [run.course for run in self.runs if run.course]

    @property
    def middle(self) -> list[float]:
        """[trials] the median of the courses, as far as all go."""
        return [statistics.median(values) for values in zip(*self.courses, strict=False)]

    @property
    def band(self) -> tuple[list[float], list[float]]:
        """[trials] the least and the most of the courses, as far as all go."""
        columns = list(zip(*self.courses, strict=False))
        return [min(values) for values in columns], [max(values) for values in columns]


def grouped(runs: Sequence[TuningRun]) -> list[Case]:
    """Runs by workload and cluster, then by sampler, in the order in which they come."""
    cases: dict[tuple[str, str], dict[str, list[TuningRun]]] = {}
    for run in runs:
        key = run.workload.fingerprint, run.cluster.fingerprint
        cases.setdefault(key, {}).setdefault(run.sampler, []).append(run)
    titles = [next(iter(samplers.values()))[0].title for samplers in cases.values()]
    made = []
    for (key, samplers), title in zip(cases.items(), titles, strict=True):
        name = title if titles.count(title) == 1 else f"{title} ({key[0][:4]}, {key[1][:4]})"
        made.append(Case(name, tuple(Group(sampler, tuple(found)) for sampler, found in samplers.items())))
    return made
