"""The result of a bench: every step of every round, and statistics of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Record, Result, seconds_text
from lightning_autosync.measure.bench.preparation import Preparation
from lightning_autosync.measure.bench.settings import BenchSettings, Exactness
from lightning_autosync.measure.conditions import BUSY_CORES
from lightning_autosync.measure.hosts import Bound
from lightning_autosync.measure.step_time import Interval, Steps, paired_ratio, relative_medians, step_time
from lightning_autosync.workload import Workload

_OLD_RATIOS = ("ratio_to_best_ddp", "ratio_to_first_ddp")


class ContenderDocument(Record):
    """The measurement of one contender, and statistics of it.

    Attributes:
        exactness: how exact its training is; the field is called ``class``.
        why: why it is of this class; None if there is nothing to say.
        median_seconds, least_seconds, most_seconds: seconds of a step over rounds.
        seconds_are: how a round's steps become one time.
        speedup_over_best_ddp: the best DDP's time divided by its time, paired by round; None in older files.
        bound_share: the bound relative to its median; None without a bound.
        bytes_per_step_and_rank: payload bytes, the median over rounds; None if they cannot be counted.
        gradient_deviation: relative difference of its first gradients from the first DDP's; None where meaningless.
        round_seconds, round_bytes_per_step_and_rank, round_foreign_cores: the same by round.
        step_seconds_by_round_and_rank: seconds by round, rank and step.
    """

    model_config = ConfigDict(populate_by_name=True)

    exactness: Exactness = Field(alias="class")
    why: str | None
    median_seconds: float
    least_seconds: float
    most_seconds: float
    seconds_are: Literal["means", "medians of a round's steps"]
    speedup_over_best_ddp: Interval | None = None
    bound_share: float | None
    bytes_per_step_and_rank: float | None
    gradient_deviation: float | None = Field(allow_inf_nan=True)
    round_seconds: tuple[float, ...]
    round_bytes_per_step_and_rank: tuple[float, ...] | None
    round_foreign_cores: tuple[float, ...] | None
    step_seconds_by_round_and_rank: tuple[tuple[tuple[float, ...], ...], ...]

    @model_validator(mode="before")
    @classmethod
    def _leave_out_ratios(cls, data: Any) -> Any:
        """Older files also have ratios of times, which are the other way round."""
        return {key: data[key] for key in data if key not in _OLD_RATIOS} if isinstance(data, Mapping) else data


class BenchDocument(Result):
    """``autosync-bench/1``: the result document of a bench.

    Attributes:
        cluster, workload: documents of what was measured; the workload has its ``bytes`` too.
        emulated: whether links and computation are emulated.
        rounds: number of complete rounds.
        meets_protocol: whether the run may back a claim.
        bound: least time of a step; None if it is unknown.
        conditions: versions, load and policies.
        foreign_cores: mean number of cores that other processes kept busy; None if unknown.
        best_ddp: name of the fastest DDP setting.
        best_exact_plan: name of the fastest exact plan; None if there is none.
        contenders: measurements by name.
    """

    FORMAT: ClassVar[str] = "autosync-bench/1"

    settings: BenchSettings
    cluster: dict[str, Any]
    workload: dict[str, Any]
    emulated: dict[str, bool]
    rounds: int
    meets_protocol: bool
    bound: Bound | None
    conditions: dict[str, Any]
    foreign_cores: float | None
    best_ddp: str
    best_exact_plan: str | None
    contenders: dict[str, ContenderDocument]

    def figures(self) -> dict[str, str]:
        found = {"best DDP": f"{self.best_ddp}, {seconds_text(self.contenders[self.best_ddp].median_seconds)}"}
        best = self.best_exact_plan
        if best is None:
            return found
        contender = self.contenders[best]
        found["best exact plan"] = f"{best}, {seconds_text(contender.median_seconds)}"
        if (speedup := contender.speedup_over_best_ddp) is not None:
            found["speedup"] = f"{speedup.median:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}]"
        if contender.bound_share is not None:
            found["of bound"] = f"{contender.bound_share:.1%}"
        return found


@dataclass(frozen=True)
class ContenderMeasurement:
    """The measurement of one contender.

    Attributes:
        rounds: seconds by round, rank and step.
        sent: by round, payload bytes that a rank sent per step; None if they cannot be counted.
        foreign_cores: by round, number of cores that other processes kept busy; None if unknown.
        deviation: relative difference of its first gradients from those of the first DDP contender. It is meaningless
            for hooks that begin with exact steps, so the result document omits it for them.
        periodic: whether steps differ by design, so that a round's time is their mean and not their median.
    """

    rounds: Sequence[Steps]
    sent: Sequence[float] | None
    foreign_cores: Sequence[float] | None
    deviation: float
    periodic: bool = False

    @cached_property
    def times(self) -> list[float]:
        """Seconds of a step, by round."""
        return [step_time(steps_by_rank, mean=self.periodic) for steps_by_rank in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def bytes_per_step(self) -> float | None:
        """Payload bytes that a rank sent per step, the median over rounds."""
        return statistics.median(self.sent) if self.sent is not None else None


@dataclass(frozen=True)
class BenchResult:
    """One bench run.

    Attributes:
        preparation: cluster, workload and plans that were used.
        bound: least time of a step on emulated links; None if links are not emulated or computation is real.
        conditions: versions, load and policies of rank 0's machine; names of all machines; how bytes were counted.
        measurements: measurements by contender, DDP first.
    """

    settings: BenchSettings
    preparation: Preparation
    bound: Bound | None
    conditions: dict[str, Any]
    measurements: dict[str, ContenderMeasurement]

    @property
    def cluster(self) -> ClusterSpec:
        return self.preparation.cluster

    @property
    def workload(self) -> Workload:
        return self.preparation.workload

    @cached_property
    def best_ddp(self) -> str:
        """The fastest setting of the DDP sweep.

        Times are relative to the median of their round, so that temporary load by other processes does not decide.
        Contenders with hooks or sparse embeddings train differently and do not count.
        """
        times = {options.name: self.measurements[options.name].times for options in self.settings.ddp.options()}
        return self._fastest(times)

    @property
    def best_exact(self) -> str | None:
        """The fastest exact plan for the same module (so without sparse embeddings); None if there is none."""
        contenders = self.settings.all_contenders()
        plans = [name for name, one in contenders.items() if one.ddp is None and one.embeddings != "sparse"]
        names = [name for name in plans if self.classes[name] == "exact"]
        return self._fastest({name: self.measurements[name].times for name in names}) if names else None

    @property
    def classes(self) -> dict[str, Exactness]:
        return self.preparation.classes

    @staticmethod
    def _fastest(times: dict[str, list[float]]) -> str:
        return min(relative_medians(times).items(), key=lambda item: item[1])[0]

    @property
    def paced(self) -> bool:
        """Whether computation is paced."""
        return self.settings.model.kind == "paced"

    @property
    def foreign_cores(self) -> float | None:
        """Number of cores that other processes kept busy, the mean over all turns; None if unknown."""
        found = [measurement.foreign_cores for measurement in self.measurements.values()]
        known = [cores for rounds in found if rounds is not None for cores in rounds]
        return statistics.mean(known) if known else None

    @property
    def meets_protocol(self) -> bool:
        """Whether the run may back a claim: it is long enough, complete and undisturbed by other processes."""
        whole = all(len(one.rounds) == self.settings.rounds for one in self.measurements.values())
        return self.settings.long_enough and whole and (self.foreign_cores or 0.0) <= BUSY_CORES

    def speedup(self, name: str, reference: str | None = None) -> Interval:
        """A contender's speedup over the reference (default: the best DDP), paired by round; above 1 is faster."""
        other = self.measurements[reference or self.best_ddp]
        return paired_ratio(other.times, self.measurements[name].times)

    def bound_share(self, name: str) -> float | None:
        """The bound relative to the median of an exact contender; None for other contenders or without a bound."""
        if self.bound is None or self.classes[name] != "exact":
            return None
        return self.bound.seconds / self.measurements[name].median

    def _begins_otherwise(self, name: str) -> bool:
        options = self.settings.all_contenders()[name].ddp
        return options is not None and options.begins_otherwise

    def document(self) -> BenchDocument:
        """The whole result as a document."""
        return BenchDocument(
            settings=self.settings,
            cluster=self.cluster.to_dict(),
            workload={"bytes": self.workload.bytes, **self.workload.to_dict()},
            emulated={"links": self.settings.emulated, "compute": self.paced},
            rounds=min(len(one.rounds) for one in self.measurements.values()),
            meets_protocol=self.meets_protocol,
            bound=self.bound,
            conditions=self.conditions,
            foreign_cores=self.foreign_cores,
            best_ddp=self.best_ddp,
            best_exact_plan=self.best_exact,
            contenders={name: self._contender(name) for name in self.measurements},
        )

    def _contender(self, name: str) -> ContenderDocument:
        measurement = self.measurements[name]
        return ContenderDocument(
            exactness=self.classes[name],
            why=self.preparation.reasons.get(name),
            median_seconds=measurement.median,
            least_seconds=min(measurement.times),
            most_seconds=max(measurement.times),
            seconds_are="means" if measurement.periodic else "medians of a round's steps",
            speedup_over_best_ddp=self.speedup(name),
            bound_share=self.bound_share(name),
            bytes_per_step_and_rank=measurement.bytes_per_step,
            gradient_deviation=None if self._begins_otherwise(name) else measurement.deviation,
            round_seconds=measurement.times,
            round_bytes_per_step_and_rank=measurement.sent,
            round_foreign_cores=measurement.foreign_cores,
            step_seconds_by_round_and_rank=measurement.rounds,
        )
