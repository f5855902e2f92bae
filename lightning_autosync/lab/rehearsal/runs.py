"""The file of a rehearsal's runs: the settings that they were made with in its first line, then a run a line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy
from pydantic import ConfigDict

from lightning_autosync.documents import PLAIN, Integer, Spent, Taken
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.rehearsal.settings import Settings
from lightning_autosync.run_files import REMEDY, RunFile
from lightning_autosync.search.trial_attributes import BASELINE

FORMAT = "autosync-rehearsal-runs/3"
_FREE = frozenset({"pairs", "samplers", "seeds", "source", "runs"})
"""Settings that say which runs there are, and not what comes out of one; a run's own source is in its line."""

Key = tuple[str, str, int]
"""Pair, sampler and seed."""


@dataclass(frozen=True)
class Run:
    """What a sampler did in a world.

    Attributes:
        pair, sampler, seed: what was run.
        seconds: true seconds of a step of each trial, in order.
        measured: the same as measured, with noise.
        origins: how each point came about.
        best: least seconds of all plans that were priced by the truth in its world until it ended.
        builder: seconds of the best builder's plan.
        overhead: seconds that the sampler took for each trial.
        source: pair whose study it started from; None for none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    pair: str
    sampler: str
    seed: Integer
    seconds: list[Taken]
    measured: list[Taken]
    origins: list[str]
    best: Taken
    builder: Taken
    overhead: list[Spent]
    source: str | None = None

    @property
    def key(self) -> Key:
        """Which of the runs it is."""
        return self.pair, self.sampler, self.seed

    @cached_property
    def incumbents(self) -> numpy.ndarray[Any, Any]:
        """True seconds, after each trial, of the plan that was measured to be the fastest until then."""
        best = numpy.minimum.accumulate(self.measured)
        holders = [self.measured.index(value) for value in best]
        return numpy.asarray(self.seconds)[holders]

    @property
    def proposed(self) -> list[float]:
        """True seconds of the plans that are no builder's."""
        return [value for value, origin in zip(self.seconds, self.origins, strict=True) if origin != BASELINE]

    @property
    def hit_rate(self) -> float:
        """Share of the proposals that beat the best builder."""
        return float(numpy.mean([value < self.builder for value in self.proposed])) if self.proposed else 0.0


def run_file(path: Path, settings: Settings) -> RunFile[Run]:
    """The file of a rehearsal's runs.

    Raises:
        DocumentError: its runs were made with other settings, or it is something else.
    """
    fixed = settings.model_dump(mode="json", exclude=set(_FREE))
    file = RunFile(path, FORMAT, "a rehearsal", fixed, Run)
    for run in file.runs.values():
        _check_trials(run, path)
        _check_source(run, settings, path)
    return file


def _check_trials(run: Run, path: Path) -> None:
    lengths = [len(found) for found in (run.seconds, run.measured, run.origins, run.overhead)]
    if min(lengths) != max(lengths) or not lengths[0]:
        raise DocumentError(
            f"{path}: {run.sampler} on {run.pair}, seed {run.seed}: seconds, measured, origins, overhead have "
            f"{', '.join(map(str, lengths))} trials; expected equally many, one at least"
        )


def _check_source(run: Run, settings: Settings, path: Path) -> None:
    """A run of ``transfer`` that is asked for again must have started from where it would now."""
    if run.sampler != "transfer" or "transfer" not in settings.samplers or run.pair not in settings.pairs:
        return
    wanted = settings.source_of(run.pair)
    if run.source != wanted:
        raise DocumentError(
            f"{path}: source: its run of transfer on {run.pair} started from {run.source!r}, not {wanted!r}; {REMEDY}"
        )
