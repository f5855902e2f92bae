"""``autosync fit``: trains a simulator on measured plans, and judges it beside the others on what they did not see."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.progress import Progress

from lightning_autosync.bench.fitting.comparison import Run, compare, tabulate
from lightning_autosync.bench.fitting.encoding import encode_samples
from lightning_autosync.bench.fitting.settings import Settings
from lightning_autosync.bench.fitting.splits import cluster, divide, family
from lightning_autosync.bench.fitting.table import tables
from lightning_autosync.bench.validation.hosts import shared_hosts
from lightning_autosync.documents import write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.simulator import Constants
from lightning_autosync.simulator.dataset import Dataset, Sample
from lightning_autosync.simulator.learned import LearnedEstimator, Simulator, load_simulator
from lightning_autosync.simulator.learned.examples import Examples

FORMAT = "autosync-fit/1"


def fit(configuration: dict[str, Any], directory: Path) -> None:
    """Fit one simulator to a whole dataset, after all have been judged on parts of it.

    The fitted simulator is the folder ``simulator`` in ``directory``, beside ``result.json``.

    Raises:
        AutoSyncError: a setting is wrong, or a part of the dataset cannot be read.
    """
    settings = Settings.parse(configuration)
    samples = _load(settings)
    start, constants = _start(settings)
    console = Console()
    with Progress(console=console, transient=True) as progress:
        begun = time.perf_counter()
        encoded = _encode(settings, samples, constants, progress)
        encoding = time.perf_counter() - begun
        runs = _compare(settings, samples, encoded, constants, progress)
    fitted = directory / "simulator"
    begun = time.perf_counter()
    _fit(settings, samples, encoded, start or settings.simulator.build(constants, settings.seed)).save(fitted)
    timing = {"encoding": encoding, "comparison": sum(run.seconds for run in runs)}
    timing["fitting"] = time.perf_counter() - begun
    result = _result(settings, samples, constants, runs, timing)
    write_text(directory / "result.json", json.dumps(result) + "\n")
    for table in tables(result["comparison"]):
        console.print(table)
    console.print(f"{fitted}, {directory / 'result.json'}", soft_wrap=True, highlight=False)


def _load(settings: Settings) -> list[Sample]:
    """The samples that a simulator can learn from: those of plans with a schedule."""
    samples = [sample for sample in Dataset.load(settings.dataset) if sample.plan.has_schedule]
    if not samples:
        raise DocumentError(f"dataset: {', '.join(settings.dataset)}: no sample of a synchronous plan")
    return samples


def _start(settings: Settings) -> tuple[Simulator | None, Constants]:
    """The simulator to train further, if there is one, and the constants of all."""
    if settings.start is None:
        return None, shared_hosts(settings.constants, settings.cores)
    if settings.constants is not None or settings.cores is not None:
        raise DocumentError("start: a fitted simulator has constants of its own; leave out constants and cores")
    start = load_simulator(settings.start)
    if not isinstance(start, LearnedEstimator):
        raise DocumentError(f"start: {settings.start}: a replay learns nothing; give a learned simulator")
    if start.kind.name != settings.simulator.kind:
        raise DocumentError(f"start: {settings.start}: it is '{start.kind.name}', not '{settings.simulator.kind}'")
    return start, start.constants


def _encode(
    settings: Settings, samples: Sequence[Sample], constants: Constants, progress: Progress
) -> dict[str, Examples]:
    kinds = tuple(dict.fromkeys((*settings.compare, settings.simulator.kind)))
    task = progress.add_task("encoding", total=len(samples))
    return encode_samples(samples, constants, kinds, settings.processes, lambda count: progress.advance(task, count))


def _compare(
    settings: Settings,
    samples: Sequence[Sample],
    encoded: Mapping[str, Examples],
    constants: Constants,
    progress: Progress,
) -> list[Run]:
    """All runs."""
    total = settings.seeds * len(settings.splits) * len(settings.compare)
    task = progress.add_task("comparing", total=total)
    runs = []
    for run in compare(settings, samples, encoded, constants):
        runs.append(run)
        progress.advance(task)
    return runs


def _fit(
    settings: Settings, samples: Sequence[Sample], encoded: Mapping[str, Examples], simulator: Simulator
) -> Simulator:
    """Train on all samples but some plans, by which the epoch is chosen."""
    if isinstance(simulator, LearnedEstimator):
        split = divide(samples, "trial", settings.seed)
        examples = encoded[settings.simulator.kind]
        chosen = numpy.setdiff1d(numpy.arange(len(examples)), split.validation)
        simulator.fit_encoded(examples.part(chosen), examples.part(split.validation))
    return simulator


def _result(
    settings: Settings,
    samples: Sequence[Sample],
    constants: Constants,
    runs: Sequence[Run],
    timing: Mapping[str, float],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json"),
        "constants": constants.to_dict(),
        "dataset": {
            "samples": len(samples),
            "clusters": sorted({cluster(sample) for sample in samples}),
            "families": sorted({family(sample) for sample in samples}),
        },
        "comparison": tabulate(runs),
        "runs": [asdict(run) for run in runs],
        "seconds": dict(timing),
    }
