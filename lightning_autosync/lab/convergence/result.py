"""The result of a comparison: every training, and summaries of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy
from pydantic import Field, PositiveFloat

from lightning_autosync.documents import Configuration, Index, Metric, Record, Result, check_format, read_data
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.convergence.settings import ConvergenceSettings


@dataclass(frozen=True)
class Groups:
    """The groups of a partial reduce that formed while all workers were active.

    Attributes:
        formed: number of groups.
        bridging: number of groups that had to wait to connect isolated workers.
        windows: number of windows of twice the bound on isolation, one starting at each group.
        apart: number of these windows whose groups did not connect all workers.
    """

    formed: Index
    bridging: int
    windows: int
    apart: int


@dataclass(frozen=True)
class TrainingRun:
    """One training.

    Attributes:
        method: name of the method.
        speed: name of the speeds.
        seed: seed of weights, mini-batches and pauses.
        rate: learning rate.
        final: validation metric of the common final model, in percent.
        reached: seconds until the average of all replicas reached the target; None if it did not or there is no target.
        seconds: seconds of the training.
        steps: number of steps, by rank.
        waiting: share of the time between a rank's computation and its next step, by rank: exchange, waiting and the
            optimizer's step. For synchronous methods it includes backward, which overlaps with the exchange.
        sent: mean bytes that a rank sent per step, by rank; None if they cannot be counted.
        state_bytes: bytes of optimizer state at the end, by rank, without temporary buffers of exchanges. The state
            grows in the first step and stays.
        moments: seconds at which the average of all replicas was evaluated.
        scores: validation metric at these moments, in percent.
        foreign_cores: number of cores that other processes kept busy; None if unknown.
        groups: groups of a partial reduce; None for other methods.
    """

    method: str
    speed: str
    seed: int
    rate: float
    final: Metric
    reached: float | None
    seconds: float
    steps: Sequence[int]
    waiting: Sequence[float]
    sent: Sequence[float] | None
    state_bytes: Sequence[int]
    moments: Sequence[float]
    scores: Sequence[Metric]
    foreign_cores: float | None
    groups: Groups | None = None


@dataclass(frozen=True)
class Summary:
    """The runs of a method under some speeds, compared with the reference.

    Attributes:
        runs: number of trainings.
        final: mean of the final metric, in percent.
        deviation: standard deviation of the final metric over seeds; 0 for a single seed.
        difference: ``final`` minus the reference's, in percentage points.
        reached: median seconds to the target; infinite if half of the trainings or more missed it, None without target.
        times: seconds to the target of the trainings that reached it, ascending.
        faster: speedup to the target over the reference; None if either median is not finite, or that of this
            method is 0.
        steps: steps per second of all workers together, mean over runs.
        waiting: mean share of time in which a worker waited or exchanged; see `TrainingRun`.
        sent: bytes that the median rank sent per step, mean over runs; None if they cannot be counted.
        sent_most: the same for the rank that sent most.
        state_bytes: bytes of optimizer state on the median rank, maximum over runs.
        state_most: bytes of optimizer state on the rank that has most, maximum over runs.
        bridging: share of the groups that had to connect isolated workers; None without groups.
        windows: number of windows of groups that should have connected all workers.
        apart: number of these windows that did not.
    """

    runs: int
    final: Metric
    deviation: Metric
    difference: Metric
    reached: float | None
    times: Sequence[float]
    faster: float | None
    steps: float
    waiting: float
    sent: float | None
    sent_most: float | None
    state_bytes: float
    state_most: int
    bridging: float | None
    windows: int
    apart: int


class ConvergenceDocument(Result):
    """``autosync-convergence/2``: the result document of a comparison.

    Attributes:
        emulated: whether computation and links are emulated.
        model_bytes: bytes of the model's parameters.
        all_reduce_bytes: bytes that a rank sends per step in a ring all-reduce.
        rates: learning rate of each method.
        conditions: versions, load and policies.
        summaries: summaries by speed and method, with None instead of an infinite time.
        runs, tuning: compared trainings, and those that chose learning rates.
    """

    FORMAT: ClassVar[str] = "autosync-convergence/2"

    settings: dict[str, Any]
    emulated: dict[str, bool]
    model_bytes: Index
    all_reduce_bytes: float
    rates: dict[str, float]
    conditions: dict[str, Any]
    summaries: dict[str, dict[str, Summary]]
    runs: tuple[TrainingRun, ...]
    tuning: tuple[TrainingRun, ...]

    def figures(self) -> dict[str, str]:
        """For each method under the first speeds: final metric, and speedup to the target over the reference."""
        found = {}
        for method, one in next(iter(self.summaries.values()), {}).items():
            faster = "" if one.faster is None else f", {one.faster:.2f}x"
            found[method] = f"{one.final:.2f} %{faster}"
        return found


@dataclass(frozen=True)
class ConvergenceResult:
    """One comparison; fields are as in `ConvergenceDocument`."""

    settings: ConvergenceSettings
    model_bytes: int
    rates: dict[str, float]
    runs: Sequence[TrainingRun]
    tuning: Sequence[TrainingRun]
    conditions: dict[str, Any]

    def of(self, method: str, speed: str) -> list[TrainingRun]:
        """The runs of a method under some speeds."""
        return [run for run in self.runs if (run.method, run.speed) == (method, speed)]

    def summary(self, method: str, speed: str) -> Summary:
        """A summary of the runs of a method under some speeds."""
        runs, reference = self.of(method, speed), self.of(self.settings.reference, speed)
        finals = [run.final for run in runs]
        reached, compared = median_time(runs), median_time(reference)
        sent = [run.sent for run in runs if run.sent is not None]
        counted = len(sent) == len(runs)
        groups = [run.groups for run in runs if run.groups is not None]
        formed = sum(one.formed for one in groups)
        return Summary(
            runs=len(runs),
            final=statistics.mean(finals),
            # Not by `statistics`, which fails at the NaN of a training that diverged.
            deviation=float(numpy.std(finals, ddof=1)) if len(finals) > 1 else 0.0,
            difference=statistics.mean(finals) - statistics.mean(run.final for run in reference),
            reached=None if self.settings.target is None else reached,
            times=sorted(run.reached for run in runs if run.reached is not None),
            faster=compared / reached if math.isfinite(compared) and 0 < reached < math.inf else None,
            steps=statistics.mean(sum(run.steps) / run.seconds for run in runs),
            waiting=statistics.mean(share for run in runs for share in run.waiting),
            sent=statistics.mean(map(statistics.median, sent)) if counted else None,
            sent_most=statistics.mean(map(max, sent)) if counted else None,
            state_bytes=max(statistics.median(run.state_bytes) for run in runs),
            state_most=max(size for run in runs for size in run.state_bytes),
            bridging=sum(one.bridging for one in groups) / formed if formed else None,
            windows=sum(one.windows for one in groups),
            apart=sum(one.apart for one in groups),
        )

    @property
    def ring_bytes(self) -> float:
        """Bytes that a rank sends per step in a ring all-reduce: 2 (n - 1) / n times the model."""
        workers = self.settings.workers
        return 2 * (workers - 1) / workers * self.model_bytes

    def document(self) -> ConvergenceDocument:
        """The whole result as a document."""
        settings = self.settings
        return ConvergenceDocument(
            settings=settings.model_dump(mode="json"),
            emulated={"compute": settings.pace is not None, "links": settings.emulated},
            model_bytes=self.model_bytes,
            all_reduce_bytes=self.ring_bytes,
            rates=self.rates,
            conditions=self.conditions,
            summaries={
                speed: {name: _finite(self.summary(name, speed)) for name in settings.chosen_methods}
                for speed in settings.chosen_speeds
            },
            runs=tuple(self.runs),
            tuning=tuple(self.tuning),
        )


def median_time(runs: Sequence[TrainingRun]) -> float:
    """The median of the seconds to the target; runs that missed it count as infinite."""
    return statistics.median(math.inf if run.reached is None else run.reached for run in runs)


def best_rate(runs: Sequence[TrainingRun]) -> float:
    """The learning rate that reached the target first (median over seeds); ties are broken by the best final metric."""

    def quality(rate: float) -> tuple[float, float]:
        of_rate = [run for run in runs if run.rate == rate]
        return median_time(of_rate), -statistics.mean(run.final for run in of_rate)

    return min(sorted({run.rate for run in runs}), key=quality)


class _Task(Record, extra="ignore"):
    kind: str


class _Footing(Record, extra="ignore"):
    """The settings on which a learning rate depends."""

    task: _Task
    workers: int
    momentum: float


_EARLIER_FORMAT = "autosync-convergence/1"


class _Earlier(Configuration, extra="ignore"):
    settings: _Footing
    rates: dict[str, Annotated[PositiveFloat, Field(le=1e6)]]


def load_rates(path: str, settings: ConvergenceSettings) -> dict[str, float]:
    """The learning rates that an earlier comparison chose.

    Args:
        path: result file of the earlier comparison.
        settings: settings of the comparison that uses the rates.

    Raises:
        DocumentError: the file is not a result, or has another task, number of workers or momentum.
    """
    data = read_data(path, finite=False)  # earlier releases wrote NaN for metrics that a training does not have
    found = data.get("format") if isinstance(data, dict) else None
    if found != _EARLIER_FORMAT:  # whose settings and rates are the same
        check_format(found, ConvergenceDocument.FORMAT, path, DocumentError)
    try:
        earlier = _Earlier.parse(data)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from None
    for name, found, wanted in (
        ("task.kind", earlier.settings.task.kind, settings.task.kind),
        ("workers", earlier.settings.workers, settings.workers),
        ("momentum", earlier.settings.momentum, settings.momentum),
    ):
        if found != wanted:
            raise DocumentError(f"{path}: settings.{name}: its rates were tuned with {found!r}, not {wanted!r}")
    return earlier.rates


def _finite(summary: Summary) -> Summary:
    """The summary with None instead of an infinite time, since JSON has no infinity."""
    missed = summary.reached is not None and not math.isfinite(summary.reached)
    return replace(summary, reached=None) if missed else summary
