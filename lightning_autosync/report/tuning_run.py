"""Tuning runs on disk: one run with its derived values, and several runs grouped by what was tuned."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.drift import Drift
from lightning_autosync.measure.hosts import Bound, least_step
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.trial_attributes import BASELINE
from lightning_autosync.search.tuning.comparison import FinalComparison
from lightning_autosync.search.tuning.records import TrialRecord
from lightning_autosync.search.tuning.result import RESULT, TuningResult, read_result
from lightning_autosync.workload import Workload

CLOSE = 0.98
"""Share of the best known plan's speed from which a run counts as close to it."""


@dataclass(frozen=True)
class TuningRun:
    """One tuning run.

    Attributes:
        directory: directory of the run.
        result: its ``result.json``.
        cluster, workload: the machines and the model.
        plan: the best plan; None if no trial has a step time.
        storage: storage of the study with its password, if known; ``result`` has it without the password.
    """

    directory: Path
    result: TuningResult
    cluster: ClusterSpec
    workload: Workload
    plan: SyncPlan | None
    storage: str | None = None

    @classmethod
    def load(cls, directory: Path) -> TuningRun:
        """Read a run directory.

        Raises:
            DocumentError: a file is missing, truncated, of another format or inconsistent (the error may be of a
                subclass).
        """
        result = read_result(directory)
        if result.is_empty:
            raise DocumentError(f"{directory}: every trial was interrupted, so there is nothing to report")
        where = f"{directory / RESULT}"
        workload = {name: value for name, value in result.workload.items() if name != "bytes"}
        return cls(
            directory,
            result,
            ClusterSpec.from_dict(result.cluster, source=f"{where}: cluster"),
            Workload.from_dict(workload, source=f"{where}: workload"),
            None if result.best is None else SyncPlan.from_dict(result.best.plan, source=f"{where}: best.plan"),
        )

    @cached_property
    def trials(self) -> Sequence[TrialRecord]:
        """Trials that were not interrupted."""
        return [trial for trial in self.result.trials if not trial.interrupted]

    @property
    def title(self) -> str:
        """The names of the model and the cluster."""
        return f"{self.workload.name} on {self.cluster.name}"

    @property
    def emulated_links(self) -> bool:
        return bool(self.result.emulated.get("links"))

    @property
    def paced(self) -> bool:
        return bool(self.result.emulated.get("compute"))

    @cached_property
    def final(self) -> FinalComparison | None:
        """The final comparison; None if there was none."""
        return None if self.result.final is None else FinalComparison.read(self.result.final, str(self.directory))

    @cached_property
    def bound(self) -> Bound | None:
        """Lower bound on the step time of exact plans; None if links are not emulated or computation is real.

        Only emulated links and paced computation keep the rates and times from which the bound follows.
        """
        if not (self.cluster.measured and self.emulated_links and self.paced):
            return None
        return least_step(self.workload, self.cluster)

    @cached_property
    def drift(self) -> Drift:
        """The drift of the machine's speed during the search."""
        return Drift(self.result.drift.reference_by_trial, self.result.drift.share)

    def seconds(self, trial: TrialRecord) -> float | None:
        """Seconds of a trial's step, corrected for the drift of the machine's speed; None without a time."""
        if trial.seconds is None or trial.corrected is not None:
            return trial.corrected
        return self.drift.corrected(trial.number, trial.seconds)

    @cached_property
    def complete_seconds(self) -> dict[int, float]:
        """Corrected seconds of a step by trial number, for complete trials."""
        found = {trial.number: self.seconds(trial) for trial in self.trials if trial.state == "complete"}
        return {number: seconds for number, seconds in found.items() if seconds is not None}

    @cached_property
    def best_so_far(self) -> list[float]:
        """[trials] smallest step time of the complete trials so far, in seconds; infinite before the first one."""
        times = (self.complete_seconds.get(trial.number, math.inf) for trial in self.trials)
        return list(accumulate(times, min))

    @cached_property
    def builder_seconds(self) -> float | None:
        """Step time of the best builder during the search, in seconds; None if no builder ran."""
        return None if self.result.opponents.builder is None else self.result.opponents.builder.seconds

    @property
    def ddp_seconds(self) -> float | None:
        """Step time of the best-tuned DDP in seconds; None if it did not run."""
        return None if self.result.opponents.ddp is None else self.result.opponents.ddp.seconds

    @cached_property
    def speeds(self) -> list[float]:
        """[trials] speedup of the best plan so far over the best-tuned DDP; empty without DDP."""
        return [self.ddp_seconds / best for best in self.best_so_far] if self.ddp_seconds else []

    @property
    def proposals(self) -> list[TrialRecord]:
        """Trials that the sampler proposed: all except enqueued builders."""
        return [trial for trial in self.trials if trial.origin != BASELINE]

    def hit(self, trial: TrialRecord) -> bool:
        """Whether a trial was faster than the best builder."""
        limit = self.builder_seconds
        return limit is not None and self.complete_seconds.get(trial.number, math.inf) < limit

    @property
    def hits(self) -> int:
        """Number of the proposals that beat the best builder."""
        return sum(self.hit(trial) for trial in self.proposals)

    @property
    def hit_rate(self) -> float | None:
        """Share of the proposals that beat the best builder; None without proposals or without a builder."""
        if not self.proposals or self.builder_seconds is None:
            return None
        return self.hits / len(self.proposals)

    @property
    def best_seconds(self) -> float:
        """Step time of the best plan in seconds: from the final comparison, or else from the search.

        Raises:
            DocumentError: there is no plan.
        """
        if self.result.best is None:
            raise DocumentError(f"{self.directory}: no trial completed")
        return self.result.best.seconds if self.final is None else self.final.seconds

    @property
    def trials_to_98(self) -> int | None:
        """Number of trials until 98% of the speed of the run's own best plan was reached; None without a plan."""
        best = self.best_so_far[-1]
        if math.isinf(best):
            return None
        return 1 + next(index for index, seconds in enumerate(self.best_so_far) if best >= 0.98 * seconds)

    @property
    def sampler(self) -> str:
        """Name of the sampler in the settings."""
        return str(self._search.get("sampler", "autosync"))

    @property
    def seed(self) -> int | None:
        """Seed of the search in the settings."""
        found = self._search.get("seed")
        return found if isinstance(found, int) else None

    @property
    def _search(self) -> dict[str, Any]:
        found = self.result.settings.get("search")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Range:
    """Median, minimum and maximum of some values."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Range | None:
        """The range of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True)
class SamplerRuns:
    """Runs of one sampler for one workload on one cluster, with different seeds."""

    sampler: str
    runs: tuple[TuningRun, ...]

    @property
    def speeds(self) -> list[list[float]]:
        """[runs][trials] speedup of the best plan so far over the run's own best-tuned DDP; 0 before the first plan."""
        return [run.speeds for run in self.runs if run.speeds]

    @property
    def middle(self) -> list[float]:
        """[trials] median over runs, for as many trials as all runs have."""
        return [statistics.median(values) for values in zip(*self.speeds, strict=False)]

    @property
    def band(self) -> tuple[list[float], list[float]]:
        """[trials] minimum and maximum over runs, for as many trials as all runs have."""
        columns = list(zip(*self.speeds, strict=False))
        return [min(values) for values in columns], [max(values) for values in columns]


@dataclass(frozen=True)
class Case:
    """All runs for one workload on one cluster.

    Attributes:
        title: names of the model and the cluster, with parts of their fingerprints if other cases share the names.
        groups: one group per sampler.
    """

    title: str
    groups: tuple[SamplerRuns, ...]

    @property
    def runs(self) -> list[TuningRun]:
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def best_known(self) -> float:
        """The largest speedup of a run's best plan over the run's own best-tuned DDP; 0 if nothing was measured.

        Runs are not interleaved, so seconds of different runs cannot be compared; speedups can.
        """
        return max((speeds[-1] for group in self.groups for speeds in group.speeds), default=0.0)

    def trials_to_close(self, run: TuningRun) -> int | None:
        """Number of trials until a run reached `CLOSE` of the best known plan's speed; None if it never did."""
        for count, speed in enumerate(run.speeds, start=1):
            if speed > 0 and speed >= CLOSE * self.best_known:
                return count
        return None


def grouped(runs: Sequence[TuningRun]) -> list[Case]:
    """Group runs by workload and cluster, then by sampler; the order of the runs is kept."""
    cases: dict[tuple[str, str], dict[str, list[TuningRun]]] = {}
    for run in runs:
        key = run.workload.fingerprint, run.cluster.fingerprint
        cases.setdefault(key, {}).setdefault(run.sampler, []).append(run)
    titles = [next(iter(samplers.values()))[0].title for samplers in cases.values()]
    made = []
    for (key, samplers), title in zip(cases.items(), titles, strict=True):
        name = title if titles.count(title) == 1 else f"{title} ({key[0][:4]}, {key[1][:4]})"
        made.append(Case(name, tuple(SamplerRuns(sampler, tuple(found)) for sampler, found in samplers.items())))
    return made
