"""``autosync fit``: train a simulator on measured plans, and compare simulators on unseen plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_autosync.cli.progress import ShownProgress
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
from lightning_autosync.lab.fitting.splits import FitSettings, hold_out
from lightning_autosync.lab.fitting.whole import HeldOutSamples, card_of, fit_all
from lightning_autosync.learned import LearnedEstimator, load_simulator
from lightning_autosync.learned.card import CARD, HeldOutAccuracy
from lightning_autosync.learned.dataset import Dataset, Sample
from lightning_autosync.learned.examples import Examples
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.measure.progress import Report
from lightning_autosync.replay import Constants
from lightning_autosync.run_files import RunFile, alone


def fit(configuration: dict[str, Any], directory: Path) -> None:
    """Compare simulators on parts of a dataset, then fit one simulator to the whole dataset.

    The fitted simulator and its card are written to the folder ``simulator`` in ``directory``, beside ``runs.jsonl``
    (unless the settings name a file) and ``result.json``. What the settings hold out is not learned from; the card has
    the accuracy on it.

    Raises:
        AutoSyncError: a setting is wrong, a part of the dataset cannot be read, or the file has runs with other
            settings.
    """
    settings = FitSettings.parse(configuration)
    samples, cores = _load(settings)
    kept, apart = hold_out(samples, settings.held_out)
    start, constants = _start(settings, cores)
    judges = _judges(settings, apart, constants)  # before the training, which would be lost if they can judge nothing
    console = Console()
    shown = ShownProgress("fit")
    path = Path(settings.runs) if settings.runs else directory / "runs.jsonl"
    with alone(path), shown as report:
        file = run_file(path, settings, constants)
        begun = time.perf_counter()
        encoded = _encode(settings, kept, constants, report)
        encoding = time.perf_counter() - begun
        runs = _compare(settings, kept, encoded, constants, file, start, report)
    fitted = directory / "simulator"
    begun = time.perf_counter()
    simulator = start or settings.simulator.build(constants, settings.seed)
    fit_all(settings, kept, encoded[settings.simulator.kind], simulator)
    timing = {"encoding": encoding, "comparison": sum(run.seconds for run in runs)}
    timing["fitting"] = time.perf_counter() - begun
    card = card_of(settings, kept, apart, None if judges is None else judges.judge(simulator))
    simulator.save(fitted)
    card.save(fitted / CARD)
    result = FitResult(
        settings=settings,
        constants=constants.to_dict(),
        dataset=FittedDataset(samples=card.samples, clusters=card.clusters, families=card.models),
        comparison=tabulate(runs),
        runs=tuple(runs),
        seconds=timing,
    )
    result.write(directory)
    for table in tables(result.comparison):
        console.print(table)
    if start is not None and any(run.simulator == start.kind.KIND for run in runs):
        console.print(f"{start.kind.KIND} started from {settings.start}, which may have seen some of the test data")
    if card.accuracy is not None:
        console.print(_told(card.accuracy))
    console.print(f"{fitted}, {directory / 'result.json'}", soft_wrap=True, highlight=False)


def _judges(settings: FitSettings, apart: Sequence[Sample], constants: Constants) -> HeldOutSamples | None:
    """The held-out samples; None if there are none."""
    if not apart:
        return None
    kind = settings.simulator.kind
    encoded = encode_samples(apart, constants, tuple({"replay", kind}), settings.processes)
    return HeldOutSamples(encoded[kind], encoded["replay"])


def _told(accuracy: HeldOutAccuracy) -> str:
    own, replay = accuracy.simulator, accuracy.replay
    return (
        f"on {accuracy.plans} plans for {accuracy.pairs} held-out pairs of a model and a cluster: ranking accuracy "
        f"{own.ranking:.3f} (replay alone {replay.ranking:.3f}), median error {own.median_error:.1%} "
        f"({replay.median_error:.1%}), mean regret {own.regret:.1%} ({replay.regret:.1%})"
    )


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
    settings: FitSettings, samples: Sequence[Sample], constants: Constants, report: Report
) -> dict[str, Examples]:
    kinds = tuple(dict.fromkeys((*settings.compare, settings.simulator.kind)))
    counts: list[int] = []

    def tell(count: int) -> None:
        counts.append(count)
        report(sum(counts), len(samples), "samples encoded")

    return encode_samples(samples, constants, kinds, settings.processes, tell)


def _compare(
    settings: FitSettings,
    samples: Sequence[Sample],
    encoded: Mapping[str, Examples],
    constants: Constants,
    file: RunFile[FitRun],
    start: LearnedEstimator | None,
    report: Report,
) -> list[FitRun]:
    """All runs of the comparison."""
    total = settings.seeds * len(settings.splits) * len(set(settings.compare))
    runs: list[FitRun] = []
    for run in compare(settings, samples, encoded, constants, file, start):
        runs.append(run)
        report(len(runs), total, f"{run.simulator}, {run.split}, division {run.division}")
    return runs
