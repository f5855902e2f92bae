"""One run: a sampler with a budget in a world."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy
import optuna

from lightning_autosync.errors import DocumentError
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.search.simulated.settings import Settings
from lightning_autosync.search.simulated.world import Oracle, World
from lightning_autosync.search.studies import BASELINE, ORIGIN, describe, enqueue, suggest
from lightning_autosync.search.tuning.buckets import BucketSpace
from lightning_autosync.search.tuning.samplers import make_sampler
from lightning_autosync.search.tuning.settings import SearchSettings
from lightning_autosync.search.tuning.sources import Sources
from lightning_autosync.simulator.learned import Estimator, ReplayEstimator


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


class Contest:
    """Runs samplers; worlds and the studies that are transferred from are made once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._worlds: dict[str, World] = {}
        self._sources: dict[str, optuna.Study] = {}

    def runs(self, path: Path) -> Iterator[tuple[Run, bool]]:
        """All runs of the settings and whether they are new; those in the file are read, the others added to it."""
        found = load_runs(path)
        for pair in self._settings.pairs:
            for sampler in self._settings.samplers:
                for seed in range(self._settings.seeds):
                    run = found.get((pair, sampler, seed))
                    if run is not None:
                        yield run, False
                        continue
                    run = self.run(pair, sampler, seed)
                    _append(path, run)
                    yield run, True

    def run(self, pair: str, sampler: str, seed: int) -> Run:
        """One run."""
        world = self._world(pair)
        space = BucketSpace(world.space.workload, world.space.cluster) if sampler == "horovod" else world.space
        study = optuna.create_study(sampler=self._sampler(world, space, sampler, seed))
        if isinstance(space, PlanSpace):
            describe(study, space)
        if sampler != "transfer":
            enqueue(study, space.baselines(), BASELINE)
        return self._play(study, world, space, Run(pair, sampler, seed, [], [], [], 0.0, world.best_builder(), []))

    def _play(self, study: optuna.Study, world: World, space: PlanSpace | BucketSpace, run: Run) -> Run:
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
                seconds = world.seconds(space.plan(point))
                run.seconds.append(seconds)
                run.measured.append(seconds * math.exp(noise.gauss(0.0, settings.noise)))
                study.tell(trial, run.measured[-1])
        run.origins.extend(str(trial.user_attrs.get(ORIGIN, "drawn")) for trial in study.get_trials(deepcopy=False))
        return Run(**{**asdict(run), "best": world.best})

    def _sampler(
        self, world: World, space: PlanSpace | BucketSpace, name: str, seed: int
    ) -> optuna.samplers.BaseSampler:
        ours = name in ("autosync", "transfer", "oracle")
        estimator: Estimator = Oracle(world) if name == "oracle" else ReplayEstimator(world.known)
        studies = [self._source(self._settings.source_of(world.pair))] if name == "transfer" else []
        options = self._settings.options if ours else {}
        search = {"sampler": "autosync" if ours else name, "seed": seed, "options": options}
        return make_sampler(SearchSettings.model_validate(search), space, Sources(estimator, world.known, studies))

    def _source(self, pair: str) -> optuna.Study:
        """The study of another pair, by autosync with a seed of its own."""
        if pair not in self._sources:
            world = self._world(pair)
            study = optuna.create_study(sampler=self._sampler(world, world.space, "autosync", 1_000_003))
            describe(study, world.space)
            enqueue(study, world.space.baselines(), BASELINE)
            settings = self._settings.model_copy(update={"budget": self._settings.source_budget})
            run = Run(pair, "source", -1, [], [], [], 0.0, world.best_builder(), [])
            contest = Contest(settings)
            contest._play(study, world, world.space, run)
            self._sources[pair] = study
        return self._sources[pair]

    def _world(self, pair: str) -> World:
        if pair not in self._worlds:
            self._worlds[pair] = World(pair, self._settings)
        return self._worlds[pair]


def load_runs(path: Path) -> dict[tuple[str, str, int], Run]:
    """The runs in a file, by pair, sampler and seed; none if there is no file. A last line cut off is left out.

    Raises:
        DocumentError: a line is something else.
    """
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines):
        if number == len(lines) - 1 and not line.endswith("\n"):
            break
        try:
            data: Mapping[str, Any] = json.loads(line)
            run = Run(**data)
        except (TypeError, ValueError):
            raise DocumentError(f"{path}:{number + 1}: not a run of a rehearsal") from None
        found[run.pair, run.sampler, run.seed] = run
    return found


def _append(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")
