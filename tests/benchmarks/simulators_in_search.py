"""The gain of each kind of simulator in a search, rehearsed on recorded measurements of jobs that no simulator saw.

``python -m tests.benchmarks.simulators_in_search FOLDER`` writes predictions of the fitted simulators into FOLDER and
reads those that are there. It needs DGL, but neither a cluster nor root. ``python -m
tests.benchmarks.simulators_in_search speed`` measures the seconds of a proposal instead, and needs no DGL.

The jobs are those that the pretrained simulator did not see (its card names them): neither their model nor their
cluster. The simulators of AutoSync are fitted to the same samples as the pretrained one. A job has about 84 plans with
recorded step times. They are the only candidates of a search, and a trial draws again (with replacement) from the
recorded steps of its plan. So nothing is measured live, and the gain by new plans is not seen here. The regret is how
much slower the best of the three fastest trials is than the fastest recorded plan, by recorded medians, as a share;
without trials it is that of the plan that is predicted to be the fastest.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy
import optuna
import torch

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.lab.fitting.encoding import encode_samples
from lightning_autosync.lab.fitting.splits import cluster, family, for_all, hold_out
from lightning_autosync.learned import Estimate, Estimator, LearnedEstimator, ReplayEstimator
from lightning_autosync.learned.dataset import Dataset, Sample
from lightning_autosync.learned.examples import Examples, Keys
from lightning_autosync.learned.pretrained import load_pretrained, pretrained_card
from lightning_autosync.learned.registry import SimulatorSettings
from lightning_autosync.plan import SyncPlan, compile_plan, signature
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants, Replay, warm_up
from lightning_autosync.search import studies
from lightning_autosync.search.population import Choice, Population
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.sampler.cost_model import CostModel
from lightning_autosync.search.sampler.observations import Observations
from lightning_autosync.search.sampler.proposer import Proposer, SamplerSizes, TransferredData
from lightning_autosync.search.trial_attributes import plan_of
from lightning_autosync.workload import Workload

DATASET = Path(__file__).parents[2] / "examples" / "datasets" / "emulated"
NONE, REPLAY, PRETRAINED = "none", "replay", "pretrained"
LEARNED = ("linear", "recurrent", "attention")
TRIALS = (0, 15, 50)
"""Numbers of trials after which the regret is printed."""
SEEDS = 3
FINALISTS = 3
"""Number of fastest trials that `autosync tune` measures again. The best of them counts, as recorded."""
SOURCE_MODELS = ("bert_base-0", "resnet50-0", "densenet121-0")
SOURCE_CLUSTERS = ("four_equal", "descending", "nodes_of_two")
SOURCES = ("other model", "other cluster", "both other")
"""Relations of transferred samples to the job, as in ``conf/transfer``; each has three pairs as sources."""


class Kind(NamedTuple):
    """A row of the table: the simulator, and the relation of the samples that a search starts from, if any."""

    simulator: str
    source: str | None = None


KINDS = (*(Kind(name) for name in (NONE, *LEARNED, REPLAY, PRETRAINED)), *(Kind(REPLAY, source) for source in SOURCES))


class Job(NamedTuple):
    """A held-out workload on a held-out cluster: one sample of each plan, and its place among all held-out samples."""

    samples: tuple[Sample, ...]
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.samples[0].workload.name} on {cluster(self.samples[0])}"


class RecordedPopulation(Population):
    """The plans of a job's samples as candidates, which never change; without prices, all have the same rough price."""

    def __init__(self, space: PlanSpace, constants: Constants, samples: Sequence[Sample], prices: bool) -> None:
        super().__init__(space, constants, 1)
        for place, sample in enumerate(samples):
            made = self.add_plan(sample.plan, sample.kind)
            assert made is not None
            rough = made.rough if prices else 0.0
            self.candidates[made.signature] = replace(made, genome={"place": place}, rough=rough)
        self._of_place = {int(one.genome["place"]): one for one in self.candidates.values()}

    def of(self, choice: Choice) -> Any:
        return self._of_place[int(choice.point["place"])]

    def start(self, *_: Any) -> None: ...

    def grow(self, *_: Any) -> None: ...

    def refine(self, *_: Any) -> None: ...

    def trim(self, *_: Any) -> None: ...


class RecordedEstimator:
    """Looks up a fitted simulator's estimates of recorded plans, so that no plan is encoded again for each search."""

    is_fitted = True

    def __init__(self, places: Mapping[tuple[str, str, str], int], estimate: Estimate) -> None:
        self._places, self._estimate = places, estimate

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        job = workload.fingerprint, cluster.fingerprint
        found = [self._places[(*job, signature(plan))] for plan in plans]
        return Estimate(self._estimate.seconds[found], self._estimate.deviation[found])

    def fit(self, samples: Sequence[Sample]) -> None:
        raise AssertionError("a fitted simulator is not trained in a search")


def estimates(folder: Path, kept: Sequence[Sample], apart: Sequence[Sample]) -> dict[str, Estimate]:
    """Estimates of the samples ``apart`` by each kind of simulator; those that the folder lacks are made."""
    pretrained = load_pretrained()
    kinds = [REPLAY, "hetero", *(kind for kind in LEARNED if not _file(folder, kind).is_file())]
    judged = encode_samples(apart, pretrained.constants, kinds)
    learned = encode_samples(kept, pretrained.constants, kinds[2:]) if kinds[2:] else {}
    for kind in kinds[2:]:
        found = _fitted(kind, kept, learned[kind], pretrained.constants)
        estimate = found.estimate_encoded(judged[kind].items, judged[kind].base)
        numpy.savez(_file(folder, kind), seconds=estimate.seconds, deviation=estimate.deviation)
    of_hetero = judged["hetero"]
    seconds = numpy.exp(judged[REPLAY].base)
    return {
        **{kind: _read(_file(folder, kind)) for kind in LEARNED},
        REPLAY: Estimate(seconds, numpy.zeros(len(seconds))),
        PRETRAINED: pretrained.estimate_encoded(of_hetero.items, of_hetero.base),
    }


def _fitted(kind: str, kept: Sequence[Sample], examples: Examples, constants: Constants) -> LearnedEstimator:
    simulator = SimulatorSettings.shipped(kind).build(constants, 0)
    assert isinstance(simulator, LearnedEstimator)
    simulator.fit_encoded(examples, for_all(kept, 0, simulator.members).held_out)
    return simulator


def _file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.npz"


def _read(path: Path) -> Estimate:
    kept = numpy.load(path)
    return Estimate(kept["seconds"], kept["deviation"])


def jobs(apart: Sequence[Sample]) -> list[Job]:
    """The jobs of held-out samples, with the first sample of each plan."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for place, sample in enumerate(apart):
        found.setdefault((sample.workload.name, cluster(sample)), {}).setdefault(signature(sample.plan), place)
    return [Job(tuple(apart[place] for place in of.values()), tuple(of.values())) for of in found.values()]


def sources(job: Job, relation: str | None, samples: Sequence[Sample]) -> list[Sample]:
    """The samples of three pairs that share the job's cluster, its workload, or neither."""
    own = job.samples[0]
    models = {"other model": SOURCE_MODELS, "both other": SOURCE_MODELS, "other cluster": (own.workload.name,) * 3}
    clusters = {"other model": (cluster(own),) * 3, "both other": SOURCE_CLUSTERS, "other cluster": SOURCE_CLUSTERS}
    if relation is None:
        return []
    pairs = set(zip(models[relation], clusters[relation], strict=True))
    return [sample for sample in samples if (sample.workload.name, cluster(sample)) in pairs]


def search(job: Job, population: Population, kind: Kind, estimator: Estimator | None, given: Any, seed: int) -> Any:
    """[numbers of trials] regrets of one search."""
    truth, random = [sample.seconds for sample in job.samples], Random(seed)
    best, transferred = min(truth), TransferredData(given, [])
    proposer = Proposer(population.space, estimator, transferred, SamplerSizes(), random, population_constants())
    if estimator is None:  # the proposer would take the replay, because the rates of the links are known
        proposer._cost = CostModel(population.space.workload, population.space.cluster, None)
    proposer._population = population
    found = [truth[_first_choice(proposer, population, random)] / best - 1]
    observations, trials = Observations(), []
    for number in range(TRIALS[-1]):
        place = int(proposer.propose(observations, number).point["place"])
        steps = tuple(random.choices(job.samples[place].steps, k=len(job.samples[place].steps)))
        trials.append((statistics.median(steps), place))
        observations.measured.append((number, Choice({"place": place}), math.log(trials[-1][0])))
        observations.steps[number] = steps
        if number + 1 in TRIALS:
            found.append(min(truth[place] for _, place in sorted(trials)[:FINALISTS]) / best - 1)
    return found


def population_constants() -> Constants:
    return load_pretrained().constants


def _first_choice(proposer: Proposer, population: Population, random: Random) -> int:
    """The plan that is predicted to be the fastest before any trial; ties are broken at random."""
    candidates = list(population.candidates.values())
    random.shuffle(candidates)
    proposer._cost.learn({})
    return int(candidates[int(numpy.argmin(proposer._cost.estimate(candidates).mean))].genome["place"])


def compare(folder: Path) -> None:
    """Print the regrets of all kinds of simulators on all held-out jobs."""
    samples = [sample for sample in Dataset.load(DATASET) if sample.plan.has_schedule]
    kept, apart = hold_out(samples, pretrained_card().held_out)
    found, keys = estimates(folder, kept, apart), Keys()
    places = {(*keys.of(sample), signature(sample.plan)): place for place, sample in enumerate(apart)}
    estimators: dict[str, Estimator | None] = {name: RecordedEstimator(places, one) for name, one in found.items()}
    pools, results = jobs(apart), []
    for job in pools:
        results.append(_regrets(job, estimators, samples))
        print(job.name, len(job.samples), "plans", flush=True)
    table = {kind: numpy.array([result[kind] for result in results]) for kind in KINDS}  # [jobs, numbers of trials]
    print(f"regret in %, median [quartiles] and mean over {len(pools)} jobs, each the mean of {SEEDS} seeds")
    for kind, of in table.items():
        print(_row(" + ".join(filter(None, kind)), of, table[Kind(REPLAY)]))
    for kind in (Kind(REPLAY), Kind(PRETRAINED)):
        print(kind.simulator, "without trials, by job:", *(f"{100 * one:.1f}" for one in table[kind][:, 0]))


def _regrets(job: Job, estimators: Mapping[str, Estimator | None], samples: Sequence[Sample]) -> dict[Kind, Any]:
    """[numbers of trials] regrets of each kind, means over seeds."""
    space, constants = PlanSpace(job.samples[0].workload, job.samples[0].cluster), population_constants()
    populations = [RecordedPopulation(space, constants, job.samples, prices) for prices in (False, True)]
    found = {}
    for kind in KINDS:
        given = sources(job, kind.source, samples)
        estimator = estimators.get(kind.simulator) if kind.source is None else ReplayEstimator(constants)
        population, count = populations[kind.simulator != NONE], SEEDS if kind.source is None else 1
        runs = [search(job, population, kind, estimator, given, seed) for seed in range(count)]
        found[kind] = numpy.mean(runs, axis=0)
    return found


def _row(title: str, regrets: Any, replay: Any) -> str:
    cells = []
    for column, count in enumerate(TRIALS):
        low, middle, high = numpy.quantile(100 * regrets[:, column], (0.25, 0.5, 0.75))
        better, worse = (regrets < replay)[:, column].sum(), (regrets > replay)[:, column].sum()
        mean = 100 * regrets[:, column].mean()
        cells.append(f"{count}: {middle:.1f} [{low:.1f}, {high:.1f}] mean {mean:.1f} better {better} worse {worse}")
    return f"{title:24} " + " | ".join(cells)


def speed(asked: int = 41) -> None:
    """Print the seconds of proposals with the replay and with the pretrained simulator on two held-out jobs."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warm_up()
    held_out, samples = pretrained_card().held_out, Dataset.load(DATASET)
    own = {(family(one), cluster(one)): one for one in samples}
    for name in (held_out.models[0], held_out.clusters[0]), (held_out.models[-1], held_out.clusters[-1]):
        for kind in (REPLAY, PRETRAINED):
            first, *rest = _proposals(own[name], kind, asked)
            spread = f"median {statistics.median(rest):.3f}, mean {statistics.mean(rest):.3f}, most {max(rest):.3f}"
            print(f"{name[0]} on {name[1]}, {kind}: first {first:.2f} s, {len(rest)} others: {spread} s", flush=True)


def _proposals(sample: Sample, kind: str, count: int) -> list[float]:
    """CPU seconds of the proposals of a search whose trials are answered by the replay."""
    simulator, space = load_pretrained(), PlanSpace(sample.workload, sample.cluster)
    estimator: Estimator = simulator if kind == PRETRAINED else ReplayEstimator(simulator.constants)
    replay = Replay(sample.workload, sample.cluster, simulator.constants)
    study = optuna.create_study(sampler=AutoSyncSampler(space, estimator=estimator, seed=0))
    studies.describe(study, space)
    seconds = []
    for _ in range(count):
        begun = time.process_time()
        trial = study.ask()
        studies.suggest(trial, space)
        seconds.append(time.process_time() - begun)
        schedule = compile_plan(plan_of(trial, space), sample.workload, sample.cluster)
        study.tell(trial, replay.predict(schedule, "fluid").step_time)
    return seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "speed":
        speed()
    else:
        compare(Path(sys.argv[1]))
