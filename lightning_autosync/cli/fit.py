"""``autosync fit``: train a simulator on measured plans, and compare simulators on unseen plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.fitting.comparison import (
    FitResult,
    FitRun,
    FittedDataset,
    compare,
    run_file,
    tables,
    tabulate,
)
from lightning_autosync.lab.fitting.encoding import encode_samples
from lightning_autosync.lab.fitting.splits import FitSettings, cluster, family, for_all
from lightning_autosync.learned import LearnedEstimator, Simulator, load_simulator
from lightning_autosync.learned.dataset import Dataset, Sample
from lightning_autosync.learned.examples import Examples
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.replay import Constants
from lightning_autosync.run_files import RunFile, alone

_log = logging.getLogger(__name__)


def fit(configuration: dict[str, Any], directory: Path) -> None:
    """Compare simulators on parts of a dataset, then fit one simulator to the whole dataset.

    The fitted simulator is written to the folder ``simulator`` in ``directory``, beside ``runs.jsonl`` (unless the
    settings name a file) and ``result.json``.

    Raises:
        AutoSyncError: a setting is wrong, a part of the dataset cannot be read, or the file has runs with other
            settings.
    """
    settings = FitSettings.parse(configuration)
    samples, cores = _load(settings)
    start, constants = _start(settings, cores)
    console = Console()
    path = Path(settings.runs) if settings.runs else directory / "runs.jsonl"
    with alone(path), Progress(console=console, transient=True) as progress:
        file = run_file(path, settings, constants)
        begun = time.perf_counter()
        encoded = _encode(settings, samples, constants, progress)
        encoding = time.perf_counter() - begun
        runs = _compare(settings, samples, encoded, constants, file, start, progress)
    fitted = directory / "simulator"
    begun = time.perf_counter()
    _fit(settings, samples, encoded, start or settings.simulator.build(constants, settings.seed)).save(fitted)
    timing = {"encoding": encoding, "comparison": sum(run.seconds for run in runs)}
    timing["fitting"] = time.perf_counter() - begun
    result = FitResult(
        settings=settings,
        constants=constants.to_dict(),
        dataset=FittedDataset(
            samples=len(samples),
            clusters=tuple(sorted({cluster(sample) for sample in samples})),
            families=tuple(sorted({family(sample) for sample in samples})),
        ),
        comparison=tabulate(runs),
        runs=tuple(runs),
        seconds=timing,
    )
    result.write(directory)
    for table in tables(result.comparison):
        console.print(table)
    if start is not None and any(run.simulator == start.kind.KIND for run in runs):
        console.print(f"{start.kind.KIND} started from {settings.start}, which may have seen some of the test data")
    console.print(f"{fitted}, {directory / 'result.json'}", soft_wrap=True, highlight=False)


def _load(settings: FitSettings) -> tuple[list[Sample], set[float]]:
    """The samples of plans with a schedule, from which simulators can learn, and the numbers of cores ranks shared."""
    dataset = Dataset.load(settings.dataset)
    samples = [sample for sample in dataset if sample.plan.has_schedule]
    if not samples:
        disturbed = len(Dataset.load(settings.dataset, disturbed=True)) - len(dataset)
        what, why = "no sample of a synchronous plan", ""
        if disturbed:
            what = "no undisturbed sample of a synchronous plan"
            why = f"; other processes disturbed {disturbed} samples; collect them again, or with a larger quiet="
        raise DocumentError(f"dataset: {', '.join(settings.dataset)}: {what}{why}")
    return samples, dataset.cores


def _start(settings: FitSettings, cores: set[float]) -> tuple[LearnedEstimator | None, Constants]:
    """The simulator to train further, if there is one, and the constants for all simulators.

    Args:
        settings: settings of the fit.
        cores: numbers of cores that ranks shared when the samples were measured.

    Raises:
        DocumentError: the samples have different numbers of cores, or settings contradict the given simulator.
    """
    if settings.start is None:
        if settings.constants is None and settings.cores is None and len(cores) > 1:
            found = " and ".join(f"{number:g}" for number in sorted(cores))
            raise DocumentError(f"cores: samples were measured on {found} cores; give cores=N or constants=FILE")
        return None, emulated_hosts(settings.constants, settings.cores or next(iter(cores), None))
    if settings.constants is not None or settings.cores is not None:
        raise DocumentError("start: a fitted simulator has its own constants; leave out constants and cores")
    start = load_simulator(settings.start)
    if not isinstance(start, LearnedEstimator):
        raise DocumentError(f"start: {settings.start}: a replay cannot be trained; give a learned simulator")
    if settings.simulator.kind != start.kind.KIND:
        raise DocumentError(
            f"start: {settings.start}: kind is '{start.kind.KIND}', but simulator.kind is '{settings.simulator.kind}'"
        )
    start.tuning = settings.simulator.tuning
    return start, start.constants


def _encode(
    settings: FitSettings, samples: Sequence[Sample], constants: Constants, progress: Progress
) -> dict[str, Examples]:
    kinds = tuple(dict.fromkeys((*settings.compare, settings.simulator.kind)))
    _log.info("encoding %d samples", len(samples))
    task = progress.add_task("encoding", total=len(samples))
    return encode_samples(samples, constants, kinds, settings.processes, lambda count: progress.advance(task, count))


def _compare(
    settings: FitSettings,
    samples: Sequence[Sample],
    encoded: Mapping[str, Examples],
    constants: Constants,
    file: RunFile[FitRun],
    start: LearnedEstimator | None,
    progress: Progress,
) -> list[FitRun]:
    """All runs of the comparison."""
    total = settings.seeds * len(settings.splits) * len(set(settings.compare))
    task = progress.add_task("comparing", total=total)
    runs = []
    for run in compare(settings, samples, encoded, constants, file, start):
        runs.append(run)
        progress.advance(task)
    return runs


def _fit(
    settings: FitSettings, samples: Sequence[Sample], encoded: Mapping[str, Examples], simulator: Simulator
) -> Simulator:
    """Train on all samples; each network holds out some, by which its epoch is chosen."""
    if isinstance(simulator, LearnedEstimator):
        _log.info("training %d networks on all %d samples", simulator.members, len(samples))
        split = for_all(samples, settings.seed, simulator.members)
        simulator.fit_encoded(encoded[settings.simulator.kind], split.held_out)
    return simulator
