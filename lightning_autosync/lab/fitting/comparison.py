"""Trains every simulator on every division of the samples, and tests it on unseen samples."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
from numpy.typing import NDArray
from pydantic import ConfigDict
from rich.table import Table

from lightning_autosync.documents import PLAIN, Duration, Index, Record, Result, digest
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.fitting.encoding import spread
from lightning_autosync.lab.fitting.splits import FitSettings, Split, divide
from lightning_autosync.lab.validation.accuracy import kendall_tau
from lightning_autosync.learned import LearnedEstimator, Simulator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.dataset.parts import load_manifest
from lightning_autosync.learned.examples import Examples
from lightning_autosync.learned.simulator import read_header
from lightning_autosync.learned.training import distinct_pairs
from lightning_autosync.measure.figures import numbers_table
from lightning_autosync.replay import Constants
from lightning_autosync.run_files import RunFile


@dataclass(frozen=True)
class SimulatorAccuracy:
    """The accuracy of one simulator on one test part.

    Attributes:
        ranking: share of pairs of plans for the same workload and cluster that are predicted in the right order. Equal
            predictions count half. Pairs whose times differ by less than their measurement noise are left out; for
            plans of different batches the noise includes the machine's drift.
        left_out: share of the pairs that were left out.
        tau: Kendall's tau-b over all pairs, the mean over workloads and clusters.
        median, p90: median and 90th percentile of the relative errors of step times.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    ranking: float
    left_out: float
    tau: float
    median: float
    p90: float

    @classmethod
    def of(
        cls,
        examples: Examples,
        seconds: NDArray[numpy.float64],
        advice: str = "give compare=[] to fit without a comparison",
    ) -> SimulatorAccuracy:
        """Compare predicted ``seconds`` [samples] with measured seconds.

        Args:
            advice: what the error advises beside collecting more plans.

        Raises:
            DocumentError: all measured times are equal within noise.
        """
        predicted = numpy.log(seconds)
        right = counted = pairs = 0.0
        taus = []
        for pair in numpy.unique(examples.pair):
            members = examples.pair == pair
            target, guess = examples.target[members], predicted[members]
            upper = numpy.triu_indices(len(target), 1)
            unsure = examples.noise[members], examples.drift[members], examples.batch[members]
            distinct = distinct_pairs(target, *unsure)[upper]
            signs = numpy.sign(target[upper[0]] - target[upper[1]]) * numpy.sign(guess[upper[0]] - guess[upper[1]])
            right += float(((signs[distinct] + 1) / 2).sum())
            counted += int(distinct.sum())
            pairs += len(distinct)
            if len(target) > 1:
                taus.append(kendall_tau(target.tolist(), guess.tolist()))
        if not counted:
            raise DocumentError(
                "dataset: all test plans of the same workload and cluster are within noise of each other; collect "
                f"more, or {advice}"
            )
        errors = abs(numpy.exp(predicted - examples.target) - 1)
        return cls(
            ranking=right / counted,
            left_out=1 - counted / pairs,
            tau=statistics.mean(taus),
            median=float(numpy.median(errors)),
            p90=float(numpy.quantile(errors, 0.9)),
        )


METRICS = tuple(field.name for field in fields(SimulatorAccuracy))


class MetricSummary(Record):
    """Values of a metric in all runs, with their mean and standard deviation."""

    mean: float
    deviation: float
    runs: tuple[float, ...]


def summary(runs: list[SimulatorAccuracy]) -> dict[str, MetricSummary]:
    """The summary of each metric."""
    columns = {metric: [asdict(run)[metric] for run in runs] for metric in METRICS}
    return {
        metric: MetricSummary(
            mean=statistics.mean(values),
            deviation=statistics.stdev(values) if len(values) > 1 else 0.0,
            runs=tuple(values),
        )
        for metric, values in columns.items()
    }


Comparison = dict[str, dict[str, dict[str, MetricSummary]]]
"""Summaries by split, simulator and metric."""
FORMAT = "autosync-fit-runs/1"


@dataclass(frozen=True)
class FitRun:
    """The result of one simulator on one division.

    Attributes:
        split: how samples were divided.
        division: number of the division, counted from 0; the seed of its networks is the base seed plus this number.
        unseen: clusters and families that only the test part has.
        accuracy: accuracy on the test part.
        seconds: seconds of training and test.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    split: str
    division: Index
    simulator: str
    unseen: tuple[str, ...]
    accuracy: SimulatorAccuracy
    seconds: Duration

    @property
    def key(self) -> tuple[str, int, str]:
        """Split, division and simulator."""
        return self.split, self.division, self.simulator


class FittedDataset(Record):
    """What simulators learned from.

    Attributes:
        samples: number of samples.
        clusters, families: names of the clusters and of the families of models.
    """

    samples: Index
    clusters: tuple[str, ...]
    families: tuple[str, ...]


class FitResult(Result):
    """``autosync-fit/2``: the comparison of simulators, and how long it took.

    Attributes:
        constants: document of the hosts' constants.
        dataset: what simulators learned from.
        comparison: summaries by split, simulator and metric.
        runs: all runs of the comparison.
        seconds: seconds of encoding, comparison and fitting.
    """

    FORMAT: ClassVar[str] = "autosync-fit/2"

    settings: FitSettings
    constants: dict[str, Any]
    dataset: FittedDataset
    comparison: Comparison
    runs: tuple[FitRun, ...]
    seconds: dict[str, float]

    def figures(self) -> dict[str, str]:
        """The ranking accuracy of each simulator on each split, the mean over divisions."""
        return {
            f"{simulator}, {split}": f"ranking {metrics['ranking'].mean:.3f}"
            for split, rows in self.comparison.items()
            for simulator, metrics in rows.items()
        }


def run_file(path: Path, settings: FitSettings, constants: Constants) -> RunFile[FitRun]:
    """The file of a comparison's runs.

    Raises:
        DocumentError: its runs are of other samples or simulators, or it is not a file of runs.
    """
    parts = [part.sha256 for folder in settings.dataset for part in load_manifest(Path(folder)).parts]
    common = {
        "dataset": digest(parts),
        "start": settings.start and read_header(settings.start).weights,
        "seed": settings.seed,
        "constants": constants.to_dict(),
        **{f"simulator {kind}": settings.simulators[kind].model_dump(mode="json") for kind in settings.compare},
    }
    return RunFile(path, FORMAT, "a comparison of simulators", common, FitRun)


def compare(
    settings: FitSettings,
    samples: Sequence[Sample],
    encoded: Mapping[str, Examples],
    constants: Constants,
    file: RunFile[FitRun],
    start: LearnedEstimator | None = None,
) -> Iterator[FitRun]:
    """All runs: all simulators on a division, then the next division; on several cores.

    Runs in the file are read, new runs are added to it.

    Args:
        encoded: samples as encoded for each kind of simulator.
        file: file of runs with the same samples and simulators.
        start: trained simulator that replaces the untrained one of its kind.

    Raises:
        DocumentError: samples cannot be divided in this way, or all measured times of a test part are equal within
            noise.
    """
    numbers = range(settings.seeds) if settings.compare else ()
    divisions = [
        _Division(how, number, divide(samples, how, settings.seed, number))
        for number in numbers
        for how in settings.splits
    ]
    work = [(division, kind) for division in divisions for kind in dict.fromkeys(settings.compare)]
    known = [file.runs.get((division.how, division.number, kind)) for division, kind in work]
    missing = [piece for piece, run in zip(work, known, strict=True) if run is None]
    new = iter(spread(_Judge, (settings, encoded, constants, start), missing, settings.processes))
    for run in known:
        if run is None:
            run = next(new)
            file.append(run)
        yield run


class _Division(NamedTuple):
    how: str
    number: int
    split: Split


class _Judge:
    """Trains and tests one simulator on one division after the other."""

    def __init__(
        self,
        settings: FitSettings,
        encoded: Mapping[str, Examples],
        constants: Constants,
        start: LearnedEstimator | None,
    ) -> None:
        self._start = start
        self._seed = settings.seed
        self._options = settings.simulators
        self._encoded = encoded
        self._constants = constants

    def __call__(self, piece: tuple[_Division, str]) -> FitRun:
        (how, number, split), kind = piece
        begun = time.perf_counter()
        accuracy = judge(self._untrained(kind, self._seed + number), self._encoded[kind], split)
        return FitRun(how, number, kind, split.unseen, accuracy, time.perf_counter() - begun)

    def _untrained(self, kind: str, seed: int) -> Simulator:
        if self._start is not None and kind == self._start.kind.KIND:
            return copy.deepcopy(self._start)
        return self._options[kind].build(self._constants, seed)


def judge(simulator: Simulator, examples: Examples, split: Split) -> SimulatorAccuracy:
    """Train a simulator on the training part and test it on the test part."""
    test = examples.part(split.test)
    if not isinstance(simulator, LearnedEstimator):
        return SimulatorAccuracy.of(test, numpy.exp(test.base))
    simulator.fit_encoded(
        examples.part(split.train), [numpy.searchsorted(split.train, part) for part in split.held_out]
    )
    return SimulatorAccuracy.of(test, simulator.estimate_encoded(test.items, test.base).seconds)


def tabulate(runs: Sequence[FitRun]) -> Comparison:
    """For each split and simulator, the summary of its runs."""
    made: Comparison = {}
    for run in runs:
        row = made.setdefault(run.split, {})
        if run.simulator not in row:
            alike = [one for one in runs if (one.split, one.simulator) == (run.split, run.simulator)]
            row[run.simulator] = summary([one.accuracy for one in alike])
    return made


_TITLES = {
    "trial": "plans that it did not see",
    "cluster": "clusters that it did not see",
    "model": "families of models that it did not see",
    "both": "neither cluster nor family seen",
}
_COLUMNS = {"ranking": "ranking accuracy", "tau": "Kendall tau", "median": "median error", "p90": "p90 error"}


def tables(comparison: Comparison) -> Iterator[Table]:
    """One table per split with one row per simulator: mean and deviation over divisions, the best in bold."""
    for split, rows in comparison.items():
        first = next(iter(rows.values()))
        left_out, count = first["left_out"].mean, len(first["left_out"].runs)
        caption = f"{count} divisions; {left_out:.0%} of the pairs are within noise"
        table = numbers_table(f"{split}: {_TITLES[split]}", ("simulator",), _COLUMNS.values(), caption)
        for simulator in rows:
            table.add_row(simulator, *(_cell(rows, simulator, metric) for metric in _COLUMNS))
        yield table


def _cell(rows: Mapping[str, Mapping[str, MetricSummary]], simulator: str, metric: str) -> str:
    found = rows[simulator][metric]
    text = f"{found.mean:.3f} ± {found.deviation:.3f}"
    higher = metric in ("ranking", "tau")
    best = (max if higher else min)(rows, key=lambda name: rows[name][metric].mean)
    return f"[bold]{text}[/bold]" if simulator == best else text
