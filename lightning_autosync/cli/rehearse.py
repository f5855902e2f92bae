"""``autosync rehearse``: compare how well samplers find fast plans, with a replay instead of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.cli.tables import FILE_WIDTH
from lightning_autosync.lab.rehearsal.contest import SamplerContest, SamplerRun
from lightning_autosync.lab.rehearsal.outcome import RehearsalResult, draw, standings, table
from lightning_autosync.lab.rehearsal.settings import RehearsalSettings


def rehearse(configuration: dict[str, Any], directory: Path) -> None:
    """Run every sampler on every pair with every seed, and print the standings.

    ``runs.jsonl`` (unless the settings name a file), ``result.json``, ``curves.png`` and ``curves.svg`` are written to
    ``directory``.

    Raises:
        AutoSyncError: a setting is wrong, or the file has runs with other settings.
    """
    settings = RehearsalSettings.parse(configuration)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = Path(settings.runs) if settings.runs else directory / "runs.jsonl"
    runs: list[SamplerRun] = []
    total = len(settings.pairs) * len(settings.samplers) * settings.seeds
    with ShownProgress("rehearse") as report:
        for run, _ in SamplerContest(settings).runs(path):
            runs.append(run)
            speedup = run.builder / float(run.incumbents[-1])
            what = f"{run.sampler}, {run.pair}, seed {run.seed}"
            report(len(runs), total, f"{what}: speedup over the best builder {speedup:.3f}x")
    found = standings(runs)
    Console(width=FILE_WIDTH).print(table(found))
    RehearsalResult(
        settings=settings,
        emulated={"links": False, "compute": False, "replayed": True},
        standings=tuple(one.summary() for one in found),
    ).write(directory)
    for ending in ("png", "svg"):
        draw(found, directory / f"curves.{ending}")
