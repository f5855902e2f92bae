"""``autosync collect``: measure a dataset of plans and their step times."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.lab.collection.card import write_card
from lightning_autosync.lab.collection.collector import Collector
from lightning_autosync.lab.collection.drawing import draw_combinations
from lightning_autosync.lab.collection.settings import CollectionResult, CollectionSettings
from lightning_autosync.learned.dataset import Writer
from lightning_autosync.measure.emulation.netns import require_namespaces
from lightning_autosync.measure.hosts import emulated_hosts


def collect(configuration: dict[str, Any], directory: Path) -> None:
    """Draw plans and measure those that the dataset lacks; the same command resumes an interrupted run.

    Pairs that were measured beside too much other load are measured again.

    Parquet parts, ``manifest.json`` and ``README.md`` are written to the dataset's folder, ``result.json`` to
    ``directory``.

    Raises:
        AutoSyncError: a setting is wrong, links cannot be emulated here, a file of the dataset is damaged, or too many
            plans failed.
    """
    from lightning_autosync.learned.dataset import arrow  # noqa: F401 - an error before the first measurement

    settings = CollectionSettings.parse(configuration)
    constants = emulated_hosts(settings.constants, settings.cores)
    combinations = draw_combinations(settings)
    require_namespaces()
    start = time.perf_counter()
    with Writer(settings.dataset) as writer:
        before = len(writer.keys)
        shown = ShownProgress("collect")
        collector = Collector(settings, constants, writer, shown)
        try:
            with shown:
                collector.run(combinations)
        finally:
            writer.flush()
            write_card(writer.directory)
            seconds = time.perf_counter() - start
            CollectionResult(
                settings=settings,
                dataset=str(Path(settings.dataset).absolute()),
                pairs=len(writer.keys),
                seconds=seconds,
                **asdict(collector.progress),
            ).write(directory)
    progress = collector.progress
    rate = 60 * progress.measured / seconds
    disturbed = ""
    if progress.disturbed:
        disturbed = (
            f", {progress.disturbed} of them disturbed (other processes used more than quiet={settings.quiet:g} cores; "
            "fit ignores these, and the next run measures them again)"
        )
    Console().print(
        f"{before} pairs existed, {progress.measured} measured ({rate:.0f} per minute){disturbed}, "
        f"{len(progress.failed)} failed; dataset: {writer.directory}",
        soft_wrap=True,
        highlight=False,
    )
