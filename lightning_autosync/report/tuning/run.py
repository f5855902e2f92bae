"""`TuningRun`: a tuning run as found on disk, and what follows from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
from lightning_autosync.report.tuning.document import Trial, TuningResult, read_result
from lightning_autosync.report.tuning.final import Final
from lightning_autosync.search.trial_attributes import BASELINE
from lightning_autosync.workload import Workload


@dataclass(frozen=True)
class TuningRun:
    """One tuning run.

    Attributes:
        directory: where it was found.
        result: its ``result.json``.
        cluster, workload: the machines and the model, as they were measured.
        plan: the best plan; None if no trial came to a time.
        storage: of the study, password and all, where it is known; ``result`` has it without.
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
            DocumentError: (or a subclass) a file is missing, cut off, of another format, or inconsistent.
        """
        result = read_result(directory)
        if all(trial.interrupted for trial in result.trials):
            raise DocumentError(f"{directory}: every trial was interrupted, so there is nothing to report")
        where = f"{directory / 'result.json'}"
        workload = {name: value for name, value in result.workload.items() if name != "bytes"}
        return cls(
            directory,
            result,
            ClusterSpec.from_dict(result.cluster, source=f"{where}: cluster"),
            Workload.from_dict(workload, source=f"{where}: workload"),
            None if result.best is None else SyncPlan.from_dict(result.best.plan, source=f"{where}: best.plan"),
        )

    @cached_property
    def trials(self) -> Sequence[Trial]:
        """Those that were not interrupted, of whose plans nothing is known."""
        return [trial for trial in self.result.trials if not trial.interrupted]

    @property
    def title(self) -> str:
        """Model and cluster, as people call them."""
        return f"{self.workload.name} on {self.cluster.name}"

    @property
    def emulated_links(self) -> bool:
        return bool(self.result.emulated.get("links"))

    @property
    def paced(self) -> bool:
        return bool(self.result.emulated.get("compute"))

    @cached_property
    def final(self) -> Final | None:
        """The last comparison, side by side; None if there was none."""
        return None if self.result.final is None else Final.read(self.result.final, str(self.directory))

    @cached_property
    def bound(self) -> Bound | None:
        """The least time of any exact method; None where links are not emulated, or computation is real."""
        if not (self.cluster.measured and self.emulated_links and self.paced):
            return None
        return least_step(self.workload, self.cluster)

    @cached_property
    def drift(self) -> Drift:
        """How the machine's speed changed during the search."""
        return Drift(self.result.drift.reference_by_trial, self.result.drift.share)

    def seconds(self, trial: Trial) -> float | None:
        """Of a step of the trial, brought to the machine's usual speed where that drifted; None without a time."""
        if trial.seconds is None or trial.corrected is not None:
            return trial.corrected
        return self.drift.corrected(trial.number, trial.seconds)

    @cached_property
    def complete_seconds(self) -> dict[int, float]:
        """The same by number, of the trials that were measured to their end."""
        found = {trial.number: self.seconds(trial) for trial in self.trials if trial.state == "complete"}
        return {number: seconds for number, seconds in found.items() if seconds is not None}

    @cached_property
    def best_so_far(self) -> list[float]:
        """After each trial the least seconds of a complete one so far; infinite before the first."""
        times = (self.complete_seconds.get(trial.number, math.inf) for trial in self.trials)
        return list(accumulate(times, min))

    @cached_property
    def builder_seconds(self) -> float | None:
        """Step time of the best builder in the search; None where none ran."""
        return None if self.result.opponents.builder is None else self.result.opponents.builder.seconds

    @property
    def ddp_seconds(self) -> float | None:
        """Step time of the best-tuned DDP."""
        return None if self.result.opponents.ddp is None else self.result.opponents.ddp.seconds

    @cached_property
    def course(self) -> list[float]:
        """After each trial how many times as fast as the best-tuned DDP the best plan was; empty without DDP."""
        return [self.ddp_seconds / best for best in self.best_so_far] if self.ddp_seconds else []

    @property
    def proposals(self) -> list[Trial]:
        """Trials that the sampler proposed: all but the enqueued builders."""
        return [trial for trial in self.trials if trial.origin != BASELINE]

    def hit(self, trial: Trial) -> bool:
        """Whether a trial was measured to be faster than the best builder."""
        limit = self.builder_seconds
        return limit is not None and self.complete_seconds.get(trial.number, math.inf) < limit

    @property
    def hit_rate(self) -> float | None:
        """Share of the proposals that beat the best builder; None without proposals or without a builder."""
        if not self.proposals or self.builder_seconds is None:
            return None
        return statistics.mean(self.hit(trial) for trial in self.proposals)

    @property
    def best_seconds(self) -> float:
        """Step time of the best plan: in the last comparison, or else in the search.

        Raises:
            DocumentError: there is no plan.
        """
        if self.result.best is None:
            raise DocumentError(f"{self.directory}: no trial came to a time")
        return self.result.best.seconds if self.final is None else self.final.best.median

    @property
    def trials_to_98(self) -> int | None:
        """Trials until 98% of the speed of the run's own best was reached."""
        best = self.best_so_far[-1]
        if math.isinf(best):
            return None
        return 1 + next(index for index, seconds in enumerate(self.best_so_far) if best >= 0.98 * seconds)

    @property
    def sampler(self) -> str:
        """Name of the sampler, as the settings have it."""
        return str(self._search.get("sampler", "autosync"))

    @property
    def seed(self) -> int | None:
        """Seed of the search, as the settings have it."""
        found = self._search.get("seed")
        return found if isinstance(found, int) else None

    @property
    def _search(self) -> dict[str, Any]:
        found = self.result.settings.get("search")
        return found if isinstance(found, dict) else {}
