"""The file of a rehearsal's runs: the settings that they were made with in its first line, then a run a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from lightning_autosync.documents import append_lines, check_format
from lightning_autosync.errors import DocumentError
from lightning_autosync.search.simulated.settings import Settings
from lightning_autosync.search.studies import BASELINE

FORMAT = "autosync-rehearsal-runs/3"
_FREE = frozenset({"pairs", "samplers", "seeds", "source", "runs"})
"""Settings that say which runs there are, and not what comes out of one; a run's own source is in its line."""
_REMEDY = "go on with the settings that the file has, or give another file as runs=FILE"

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
        best: least seconds of all plans that the run priced by the truth.
        builder: seconds of the best builder's plan.
        overhead: seconds that the sampler took for each trial.
        source: pair whose study it started from; None for none.
    """

    pair: str
    sampler: str
    seed: int
    seconds: list[float]
    measured: list[float]
    origins: list[str]
    best: float
    builder: float
    overhead: list[float]
    source: str | None = None

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


class RunFile:
    """A file of runs made with some settings; a last line that was cut off counts for nothing.

    Args:
        path: of the file; made with the first run that is added.
        settings: with which runs are made now.

    Attributes:
        runs: those in it, by pair, sampler and seed.

    Raises:
        DocumentError: its runs were made with other settings (the message names the field), or it is something else.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._settings = settings
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        self._has_settings = bool(whole)
        if whole:
            _check_settings(_data(whole[0], f"{path}:1"), settings, path)
        self.runs: dict[Key, Run] = {}
        for number, line in enumerate(whole[1:], 2):
            run = _run(line, f"{path}:{number}")
            _check_source(run, settings, path)
            self.runs[run.pair, run.sampler, run.seed] = run

    def append(self, run: Run) -> None:
        """Add a run."""
        header = [] if self._has_settings else [{"format": FORMAT, "settings": _fixed(self._settings)}]
        append_lines(self._path, "".join(json.dumps(line) + "\n" for line in (*header, asdict(run))))
        self._has_settings = True


def _fixed(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude=set(_FREE))


def _data(line: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: not a line of a rehearsal's runs")
    return data


def _run(line: str, where: str) -> Run:
    try:
        return Run(**_data(line, where))
    except TypeError:
        raise DocumentError(f"{where}: not a run of a rehearsal") from None


def _check_settings(header: Mapping[str, Any], settings: Settings, path: Path) -> None:
    check_format(header.get("format"), FORMAT, f"{path}:1", DocumentError)
    theirs = header.get("settings")
    if not isinstance(theirs, dict):
        raise DocumentError(f"{path}:1: settings: expected a mapping of fields, got {type(theirs).__name__}")
    for name, value in _fixed(settings).items():
        found = theirs.get(name)
        if found != value:
            raise DocumentError(f"{path}: {name}: its runs were made with {found!r}, not {value!r}; {_REMEDY}")


def _check_source(run: Run, settings: Settings, path: Path) -> None:
    """A run of ``transfer`` that is asked for again must have started from where it would now."""
    if run.sampler != "transfer" or "transfer" not in settings.samplers or run.pair not in settings.pairs:
        return
    wanted = settings.source_of(run.pair)
    if run.source != wanted:
        raise DocumentError(
            f"{path}: source: its run of transfer on {run.pair} started from {run.source!r}, not {wanted!r}; {_REMEDY}"
        )
