"""Runs of samplers in a world with a budget of trials, and the file of runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy
import optuna
from pydantic import ConfigDict

from lightning_autosync.documents import PLAIN, Duration, Integer, PositiveDuration
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.rehearsal.settings import RehearsalSettings
from lightning_autosync.lab.rehearsal.world import Oracle, World
from lightning_autosync.learned import Estimator, ReplayEstimator
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.run_files import REMEDY, RunFile, alone
from lightning_autosync.search.studies import describe, enqueue, suggest
from lightning_autosync.search.trial_attributes import BASELINE, ORIGIN, plan_of
from lightning_autosync.search.tuning.job import PriorKnowledge
from lightning_autosync.search.tuning.samplers import BucketSpace, make_sampler
from lightning_autosync.search.tuning.settings import SearchSettings

FORMAT = "autosync-rehearsal-runs/3"
_FREE = frozenset({"pairs", "samplers", "seeds", "source", "runs"})
"""Settings that select runs but do not affect their results. A run's own source is stored with the run."""

Key = tuple[str, str, int]
"""Pair, sampler and seed."""


@dataclass(frozen=True)
class SamplerRun:
    """The run of a sampler in a world.

    Attributes:
        seconds: true step time of each trial in seconds, in order.
        measured: the same with measurement noise.
        origins: origin of each trial's point.
        best: least true step time of all plans priced in this world by the end of the run.
        builder: true step time of the best builder's plan.
        overhead: seconds that the sampler needed for each trial.
        source: pair whose study the sampler started from; None for none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    pair: str
    sampler: str
    seed: Integer
    seconds: list[PositiveDuration]
    measured: list[PositiveDuration]
    origins: list[str]
    best: PositiveDuration
    builder: PositiveDuration
    overhead: list[Duration]
    source: str | None = None

    @property
    def key(self) -> Key:
        """Pair, sampler and seed."""
        return self.pair, self.sampler, self.seed

    @cached_property
    def incumbents(self) -> numpy.ndarray[Any, Any]:
        """[trials] true seconds, after each trial, of the plan with the least measured time so far."""
        best = numpy.minimum.accumulate(self.measured)
        holders = [self.measured.index(value) for value in best]
        return numpy.asarray(self.seconds)[holders]

    @property
    def proposed(self) -> list[float]:
        """True seconds of the plans that the sampler proposed, without builders' plans."""
        return [value for value, origin in zip(self.seconds, self.origins, strict=True) if origin != BASELINE]

    @property
    def hit_rate(self) -> float:
        """Share of the proposals that beat the best builder."""
        return float(numpy.mean([value < self.builder for value in self.proposed])) if self.proposed else 0.0


def run_file(path: Path, settings: RehearsalSettings) -> RunFile[SamplerRun]:
    """The file of a rehearsal's runs.

    Raises:
        DocumentError: its runs were made with other settings, or it is not a file of runs.
    """
    fixed = settings.model_dump(mode="json", exclude=set(_FREE))
    file = RunFile(path, FORMAT, "a rehearsal", fixed, SamplerRun)
    for run in file.runs.values():
        _check_trials(run, path)
        _check_source(run, settings, path)
    return file


def _check_trials(run: SamplerRun, path: Path) -> None:
    lengths = [len(found) for found in (run.seconds, run.measured, run.origins, run.overhead)]
    if min(lengths) != max(lengths) or not lengths[0]:
        raise DocumentError(
            f"{path}: {run.sampler} on {run.pair}, seed {run.seed}: seconds, measured, origins, overhead have "
            f"{', '.join(map(str, lengths))} trials; expected the same number in each, at least 1"
        )


def _check_source(run: SamplerRun, settings: RehearsalSettings, path: Path) -> None:
    """Refuse a requested run of ``transfer`` in the file that started from another source than it would now."""
    if run.sampler != "transfer" or "transfer" not in settings.samplers or run.pair not in settings.pairs:
        return
    wanted = settings.source_of(run.pair)
    if run.source != wanted:
        raise DocumentError(
            f"{path}: source: the 'transfer' run on {run.pair} started from {run.source!r}, not {wanted!r}; "
            f"{REMEDY.format('runs')}"
        )


class SamplerContest:
    """Runs samplers. Worlds and source studies are made once."""

    def __init__(self, settings: RehearsalSettings) -> None:
        self._settings = settings
        self._worlds: dict[str, World] = {}
        self._sources: dict[str, optuna.Study] = {}

    def runs(self, path: Path) -> Iterator[tuple[SamplerRun, bool]]:
        """All runs of the settings, and whether each is new. Runs in the file are read, new runs are added to it.

        Raises:
            DocumentError: a pair is unknown, the file has runs with other settings or is not a file of runs, or another
                process is writing to it.
        """
        self._check_pairs()
        settings = self._settings
        with alone(path):
            file = run_file(path, settings)
            for pair, sampler, seed in product(settings.pairs, settings.samplers, range(settings.seeds)):
                run = file.runs.get((pair, sampler, seed))
                if is_new := run is None:
                    run = self.run(pair, sampler, seed)
                    file.append(run)
                yield run, is_new

    def _check_pairs(self) -> None:
        """Check all pairs before the first run, so that a wrong last pair is not reported hours later."""
        settings = self._settings
        named = [("pairs", pair) for pair in settings.pairs]
        if "transfer" in settings.samplers and settings.source is not None:
            named.append(("source", settings.source))
        for field, pair in named:
            try:
                self._world(pair)
            except DocumentError as error:
                raise DocumentError(f"{field}: '{pair}': {error}") from None

    def run(self, pair: str, sampler: str, seed: int) -> SamplerRun:
        """Run a sampler on a pair with a seed."""
        world = self._world(pair)
        space = BucketSpace(world.space.workload, world.space.cluster) if sampler == "horovod" else world.space
        study = optuna.create_study(sampler=self._sampler(world, space, sampler, seed))
        if isinstance(space, PlanSpace):
            describe(study, space)
        if sampler != "transfer":
            enqueue(study, space, space.baselines(), BASELINE)
        source = self._settings.source_of(pair) if sampler == "transfer" else None
        run = SamplerRun(pair, sampler, seed, [], [], [], 0.0, world.best_builder(), [], source)
        return self._play(study, world, space, run)

    def _play(self, study: optuna.Study, world: World, space: PlanSpace | BucketSpace, run: SamplerRun) -> SamplerRun:
        settings = self._settings
        noise = Random(f"{run.pair} {run.seed}")
        while len(run.seconds) < settings.budget:
            begun = []
            for _ in range(min(settings.batch, settings.budget - len(run.seconds))):
                start = time.perf_counter()
                trial = study.ask()
                point = suggest(trial, space) if isinstance(space, PlanSpace) else space.suggest(trial)
                run.overhead.append(time.perf_counter() - start)
                begun.append((trial, point))
            for trial, point in begun:
                plan = plan_of(trial, space) if isinstance(space, PlanSpace) else space.plan(point)
                seconds = world.seconds(plan)
                run.seconds.append(seconds)
                run.measured.append(seconds * math.exp(noise.gauss(0.0, settings.noise)))
                study.tell(trial, run.measured[-1])
        told = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        run.origins.extend(str(trial.user_attrs.get(ORIGIN, "drawn")) for trial in told)
        return replace(run, best=world.best)

    def _sampler(
        self, world: World, space: PlanSpace | BucketSpace, name: str, seed: int
    ) -> optuna.samplers.BaseSampler:
        ours = name in ("autosync", "transfer", "oracle")
        estimator: Estimator = Oracle(world) if name == "oracle" else ReplayEstimator(world.known)
        studies = [self._source(self._settings.source_of(world.pair))] if name == "transfer" else []
        options = self._settings.options if ours else {}
        search = {"sampler": "autosync" if ours else name, "seed": seed, "options": options}
        return make_sampler(
            SearchSettings.model_validate(search), space, PriorKnowledge(estimator, world.known, studies)
        )

    def _source(self, pair: str) -> optuna.Study:
        """The study of another pair, by autosync with a seed that no run uses."""
        if pair not in self._sources:
            world = self._world(pair)
            study = optuna.create_study(sampler=self._sampler(world, world.space, "autosync", 1_000_003))
            describe(study, world.space)
            enqueue(study, world.space, world.space.baselines(), BASELINE)
            settings = self._settings.model_copy(update={"budget": self._settings.source_budget})
            run = SamplerRun(pair, "source", -1, [], [], [], 0.0, world.best_builder(), [])
            contest = SamplerContest(settings)
            contest._play(study, world, world.space, run)
            self._sources[pair] = study
        return self._sources[pair]

    def _world(self, pair: str) -> World:
        if pair not in self._worlds:
            self._worlds[pair] = World(pair, self._settings)
        return self._worlds[pair]
