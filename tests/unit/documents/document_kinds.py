"""Every kind of document that the package reads: a valid one, and the way by which commands read it."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, get_args

import optuna
import pyarrow
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from pyarrow import parquet
from tuned_plans import tuned
from tuning_runs import write_run
from tuning_world import World

from hydra_plugins.autosync import _study as sweeps
from hydra_plugins.autosync._space import read_space as sweep_space
from lightning_autosync.cli import predict as predicting
from lightning_autosync.cli.arguments import prepared
from lightning_autosync.cli.cache import describe_tuned
from lightning_autosync.cli.report import ReportResult, report
from lightning_autosync.cli.validate import hosts_of
from lightning_autosync.cluster import ClusterSpec, configuration_directory, read_resource_spec, resolve_cluster
from lightning_autosync.documents import RESULT, Result, append_lines, checked, write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.mesh import Links, near_order
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.prediction import SentBytes
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.lab.collection.settings import CollectionResult, CollectionSettings
from lightning_autosync.lab.convergence.isolation import GroupStatistics, IsolationResult, IsolationRow
from lightning_autosync.lab.convergence.result import ConvergenceDocument, ConvergenceResult, TrainingRun, load_rates
from lightning_autosync.lab.convergence.settings import ConvergenceSettings
from lightning_autosync.lab.fitting import comparison as fitting_runs
from lightning_autosync.lab.fitting.comparison import FitResult, FittedDataset, SimulatorAccuracy, tabulate
from lightning_autosync.lab.fitting.splits import FitSettings
from lightning_autosync.lab.rehearsal.contest import SamplerRun as RehearsalRun
from lightning_autosync.lab.rehearsal.contest import run_file as rehearsal_runs
from lightning_autosync.lab.rehearsal.outcome import RehearsalResult, standings, table
from lightning_autosync.lab.rehearsal.settings import PAIRS, RehearsalSettings
from lightning_autosync.lab.validation.accuracy import CaseResult, ReplayAccuracy, ValidationResult
from lightning_autosync.lab.validation.measuring import CaseMeasurement, load_measurements
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.learned import LearnedEstimator, ReplayEstimator, Training, load_simulator
from lightning_autosync.learned.card import CARD, SimulatorCard
from lightning_autosync.learned.dataset import Conditions, Dataset, Entry, Sample, Writer
from lightning_autosync.learned.dataset.parts import MANIFEST
from lightning_autosync.learned.dataset.writer import JOURNAL
from lightning_autosync.learned.pretrained import DIRECTORY
from lightning_autosync.learned.simulator import HEADER
from lightning_autosync.measure.bench.result import BenchDocument, ContenderDocument
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import Bound, emulated_hosts
from lightning_autosync.measure.interleaving import TrialMeasurement
from lightning_autosync.measure.models.recipes import Paced
from lightning_autosync.measure.probe.settings import ProbeDocument
from lightning_autosync.measure.session import Contender
from lightning_autosync.measure.step_time import Interval
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants, MessageSpan, Replay, Span, Timeline, least_step
from lightning_autosync.report.comparison import find_runs
from lightning_autosync.report.gain import GainResult, GainRow
from lightning_autosync.report.gain import Kind as GainKind
from lightning_autosync.report.hybrid_prediction import HybridPredictionResult
from lightning_autosync.report.predict import PredictionResult
from lightning_autosync.report.summary import summary_row
from lightning_autosync.report.timeline import TIMELINES, load_timelines, save_timelines, write_trace
from lightning_autosync.search import studies
from lightning_autosync.search import trial_attributes as attrs
from lightning_autosync.search.hybrid.result import HybridTrial, HybridTuningResult, read_hybrid_result
from lightning_autosync.search.memory import TunedPlan, TuningCache
from lightning_autosync.search.memory.nearness import nearest
from lightning_autosync.search.studies import check
from lightning_autosync.search.transfer import TransferSettings, best_points, load_transfer
from lightning_autosync.search.tuning.records import drift_of, ranked
from lightning_autosync.strategy import autoddl
from lightning_autosync.strategy.checkpoint import FORMAT as EXACT_STATE
from lightning_autosync.strategy.checkpoint import KEY as STATE_KEY
from lightning_autosync.strategy.checkpoint import RELAXED_FORMAT, RelaxedCheckpoint, own_state
from lightning_autosync.training.settings import TrainingResult, TrainingSettings
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.star([4e7, 1e7, 1e7], latency="50 us", name="star")
WORKLOAD = Workload(
    name="small",
    variables=(
        Variable(name="front", shape=(64, 9), ready=0.02),
        Variable(name="wide", shape=(200, 30), kind="row_sparse", rows=8.0, ready=0.01),
        Variable(name="b", shape=(64,)),
    ),
    forward_time=0.01,
    backward_time=0.02,
)
SPACE = PlanSpace(WORKLOAD, CLUSTER)

RESULTS = (
    "documents.records",
    "measure.bench.result",
    "measure.probe.settings",
    "lab.collection.settings",
    "lab.convergence.result",
    "lab.fitting.comparison",
    "lab.rehearsal.outcome",
    "lab.validation.accuracy",
    "lab.convergence.isolation",
    "cli.report",
    "report.gain",
    "report.predict",
    "report.hybrid_prediction",
    "training.settings",
)
"""Modules with classes of results."""
Made = Callable[[Path], list[str]]
Use = Callable[[], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of document.

    Attributes:
        make: writes a valid one into an empty directory; returns the names of the files to be changed, which end as
            what is in them does.
        read: reads it as commands do; what it returns makes use of it, and may refuse it without naming the file.
        covers: modules of the package whose readers are called by that.
        names: what an error names, if not the file: of studies in databases there is none.
        seal: makes checksums agree with a changed file, so that what reads it is reached at all.
        share: of the mutations, relative to the other kinds: less of what takes long.
    """

    make: Made
    read: Callable[[Path], Use | None]
    covers: tuple[str, ...]
    names: tuple[str, ...] = ()
    seal: Callable[[Path], None] | None = None
    share: float = 1.0


def _price(workload: Workload, cluster: ClusterSpec, plan: SyncPlan, constants: Constants | None = None) -> None:
    constants = constants or Constants()
    Replay(workload, cluster, constants).predict(compile_plan(plan, workload, cluster))
    least_step(workload, cluster, constants.framing, constants.burst)


# Clusters, workloads, plans, constants


def _cluster(name: str, data: dict[str, Any]) -> Kind:
    def make(folder: Path) -> list[str]:
        write = ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "own", **data})
        if name.endswith("json"):
            write.save(folder / name)
        else:
            text = json.dumps({"format": ClusterSpec.FORMAT, "name": "own", **data})
            (folder / name).write_text(text)
        return [name]

    def read(folder: Path) -> Use:
        made = folder / "made"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        prepared([f"cluster={folder / name}"], made)
        cluster = resolve_cluster(folder / name)
        return lambda: _use_cluster(cluster)

    return Kind(make, read, ("cli.arguments", "cli.configuration", "cluster.spec"))


def _use_cluster(cluster: ClusterSpec) -> None:
    cluster.localities()
    if cluster.world_size <= 16:
        _price(WORKLOAD, cluster, builders.build("ps", WORKLOAD, cluster))


_NODES = {
    "nodes": [{"name": "a", "devices": 2, "speed": 1.5, "memory": "16 GiB"}, {"name": "b", "address": "10.0.0.2"}],
    "switches": ["s"],
    "links": [
        {"a": "a", "b": "s", "bandwidth": "1 Gbit/s", "latency": "50 us"},
        {"a": "b", "b": "s", "bandwidth": 1e7, "reverse_bandwidth": 2e7},
    ],
    "local_bandwidth": "10 GB/s",
    "rank_order": ["a", "b", "a"],
}


def _make_resource_spec(folder: Path) -> list[str]:
    nodes = [
        {"address": "10.0.0.1", "chief": True, "gpus": [0, 1], "cpus": [0], "network_bandwidth": 25},
        {"address": "10.0.0.2", "gpus": [0], "ssh_config": "conf"},
    ]
    (folder / "resource_spec.yml").write_text(json.dumps({"nodes": nodes, "ssh": {"conf": {"username": "u"}}}))
    return ["resource_spec.yml"]


def _read_resource_spec(folder: Path) -> Use:
    cluster = read_resource_spec(folder / "resource_spec.yml")
    return lambda: _use_cluster(cluster)


def _make_workload(folder: Path) -> list[str]:
    WORKLOAD.save(folder / "workload.yaml")
    return ["workload.yaml"]


def _read_workload(folder: Path) -> Use:
    workload = Workload.load(folder / "workload.yaml")
    paced = {"kind": "paced", "workload_file": str(folder / "workload.yaml"), "scale": 0.5, "compute": "10 ms"}

    def use() -> None:
        _price(workload, CLUSTER, builders.build("all_reduce", workload, CLUSTER))
        checked(Paced, paced, "model").workload("rows")

    return use


def _make_plan(folder: Path) -> list[str]:
    plan = SPACE.plan(SPACE.draw(Random(3)))
    plan.save(folder / "plan.yaml")
    served = {
        **plan.to_dict(),
        "servers": 1,
        "consistency": {"mode": "bounded_staleness", "staleness": 2},
        "groups": [
            {
                "name": "all",
                "variables": ["front", "wide", "b"],
                "architecture": "parameter_server",
                "partition": {"shards": 2, "weights": [1, 2.5]},
                "placement": [0, 3],
            }
        ],
    }
    (folder / "served.json").write_text(json.dumps(served))
    tree = {"weight": 2.5, "parents": [-1, 0, 0]}
    packed = {"name": "all", "variables": ["front", "b"], "topology": "packed", "trees": [tree, tree], "segment": 4096}
    wide = {"name": "wide", "variables": ["wide"], "topology": "ring", "priority": 2}
    (folder / "packed.yaml").write_text(json.dumps({**plan.to_dict(), "groups": [packed, wide]}))
    return ["plan.yaml", "served.json", "packed.yaml"]


def _read_plan(folder: Path) -> Use:
    plans = [SyncPlan.load(path) for path in sorted(folder.glob("*.*"))]

    def use() -> None:
        for plan in plans:
            plan.describe(WORKLOAD)
            if plan.has_schedule:
                _price(WORKLOAD, CLUSTER, plan)

    return use


def _make_constants(folder: Path) -> list[str]:
    data = Constants(cores=2).model_dump(mode="json")
    (folder / "constants.yaml").write_text(json.dumps({"format": Constants.FORMAT, **data}))
    return ["constants.yaml"]


def _read_constants(folder: Path) -> Use:
    constants = emulated_hosts(str(folder / "constants.yaml"))
    plan = builders.build("ps", WORKLOAD, CLUSTER)
    return lambda: _price(WORKLOAD, CLUSTER, plan, constants)


def _make_hybrid_plan(folder: Path) -> list[str]:
    layers = [
        {"module": "front", "signature": ["dp", "col"], "output": ["batch", "features"]},
        {"module": "back", "signature": ["dp", "row"], "parts": 1, "batch_axis": 0},
    ]
    data = {"format": HybridPlan.FORMAT, "mesh": [2, 2], "ranks": [0, 2, 1, 3], "layers": layers}
    (folder / "hybrid.yaml").write_text(json.dumps(data))
    return ["hybrid.yaml"]


def _read_hybrid_plan(folder: Path) -> Use:
    plan, _ = autoddl._read_given(folder / "hybrid.yaml")
    if not isinstance(plan, HybridPlan):  # a mutation made it a plan for gradients
        return lambda: plan
    return lambda: (plan.describe(), plan.fingerprint, [plan.coordinates(rank) for rank in range(plan.world_size)])


def _make_hybrid_rates(folder: Path) -> list[str]:
    data = HybridRates(cores=2).model_dump(mode="json")
    (folder / "rates.yaml").write_text(json.dumps({"format": HybridRates.FORMAT, **data}))
    return ["rates.yaml"]


def _read_hybrid_rates(folder: Path) -> Use:
    rates = HybridRates.load(folder / "rates.yaml")
    return lambda: Pricing((3,), near_order(CLUSTER), Links(CLUSTER), rates)


def _make_hybrid_run(folder: Path) -> list[str]:
    _make_hybrid_plan(folder)
    plan = HybridPlan.load(folder / "hybrid.yaml").to_dict()
    trial = HybridTrial(number=0, name="split", origin="search", state="complete", seconds=0.5, bytes=8.0, plan=plan)
    result = HybridTuningResult(
        cluster=CLUSTER.to_dict(),
        rates={},
        model="m",
        weight_bytes=8,
        search_seconds=0.1,
        trials=(trial,),
        winner="split",
    )
    (folder / "result.json").write_text(json.dumps(result.to_dict()))
    return ["result.json"]


def _read_hybrid_run(folder: Path) -> Use:
    result = read_hybrid_result(folder)
    return lambda: (result.plan, result.comparison, list(result.lines()))


def _make_prediction(folder: Path) -> list[str]:
    names = [*_make_workload(folder), "plan.json", "cluster.yaml", "constants.json"]
    builders.build("all_reduce", WORKLOAD, CLUSTER).save(folder / "plan.json")
    CLUSTER.save(folder / "cluster.yaml")
    Constants().save(folder / "constants.json")
    return names


def _read_prediction(folder: Path) -> Use:
    files = {name: str(folder / f"{name}.yaml") for name in ("workload", "cluster")}
    files |= {name: str(folder / f"{name}.json") for name in ("plan", "constants")}
    settings = predicting.PredictSettings.model_validate(files)
    workload, cluster = predicting._workload(settings), predicting._cluster(settings.cluster)
    constants, plan = Constants.load(files["constants"]), predicting._plan(files["plan"], {}, workload, cluster)
    return lambda: predicting.predict_step(plan, workload, cluster, None, constants)


# Datasets


def _samples() -> list[Sample]:
    plans = [SPACE.plan(SPACE.draw(Random(seed))) for seed in range(3)]
    return [Sample(WORKLOAD, CLUSTER, plan, (0.1, 0.3, 0.2), "drawn", 0.15, reference=0.25) for plan in plans]


def _make_dataset(folder: Path) -> list[str]:
    with Writer(folder) as writer:
        writer.append(
            Entry(one, Conditions({"cores": 2}, foreign_cores=0.1, disturbed=place == 2))
            for place, one in enumerate(_samples())
        )
    return [MANIFEST, *(path.name for path in sorted(folder.glob("*.parquet")))]


def _read_dataset(folder: Path) -> Use:
    for disturbed in (False, True):
        dataset = Dataset.load(folder, disturbed=disturbed)
        samples = list(dataset)
        dataset.frame()
        assert isinstance(dataset.cores, set)
    return lambda: [_price(one.workload, one.cluster, one.plan) for one in samples]


def _seal_parts(folder: Path) -> None:
    manifest = folder / MANIFEST
    try:
        data = json.loads(manifest.read_text())
        for part in data["parts"]:
            content = (folder / part["file"]).read_bytes()
            part["bytes"], part["sha256"] = len(content), hashlib.sha256(content).hexdigest()
            part["rows"] = parquet.read_metadata(folder / part["file"]).num_rows
    except (ValueError, TypeError, KeyError, OSError, pyarrow.ArrowException):
        return
    manifest.write_text(json.dumps(data))


def _make_journal(folder: Path) -> list[str]:
    writer = Writer(folder)
    writer.append(Entry(one, Conditions({"cores": 2})) for one in _samples())
    content = (folder / JOURNAL).read_bytes()
    writer.close()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / JOURNAL).write_bytes(content)
    return [JOURNAL]


def _read_journal(folder: Path) -> Use:
    for path in folder.iterdir():
        if path.name != JOURNAL:
            path.unlink()
    content = (folder / JOURNAL).read_bytes()
    try:
        with Writer(folder):
            pass
    finally:
        (folder / JOURNAL).write_bytes(content)
    return lambda: _read_dataset(folder)


# Simulators


def _make_simulators(folder: Path) -> list[str]:
    made = _simulators()
    names = []
    for name, simulator in made.items():
        simulator.save(folder / name)
        names += [str(path.relative_to(folder)) for path in sorted((folder / name).iterdir())]
    return names


@lru_cache
def _simulators() -> dict[str, Any]:
    linear = LearnedEstimator("linear", members=2, training=Training(epochs=1, least_steps=1))
    hetero = LearnedEstimator(
        "hetero", members=1, network={"hidden": 8}, training=Training(epochs=1, least_steps=1, part="all")
    )
    for one in (linear, hetero):
        one.fit(_samples())
    return {"linear": linear, "hetero": hetero, "replay": ReplayEstimator(Constants())}


def _read_simulators(folder: Path) -> Use:
    made = [load_simulator(path) for path in sorted(folder.iterdir())]
    return lambda: [one.estimate(WORKLOAD, CLUSTER, [builders.build("ps", WORKLOAD, CLUSTER)]) for one in made]


def _make_simulator_card(folder: Path) -> list[str]:
    shutil.copy(DIRECTORY / CARD, folder / CARD)
    return [CARD]


def _read_simulator_card(folder: Path) -> Use:
    card = SimulatorCard.load(folder / CARD)
    return lambda: card.limits.exceeded(WORKLOAD, CLUSTER)


def _seal_weights(folder: Path) -> None:
    for header in folder.glob(f"*/{HEADER}"):
        weights = list(header.parent.glob("*.safetensors"))
        try:
            data = json.loads(header.read_text())
            if weights and data["weights"]:
                found = hashlib.sha256(weights[0].read_bytes()).hexdigest()
                data["weights"] = found
                weights[0].rename(weights[0].with_name(f"weights-{found[:12]}.safetensors"))
                header.write_text(json.dumps(data))
        except (ValueError, TypeError, KeyError):
            continue


# Studies


def _make_study(folder: Path) -> list[str]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = studies.open_study(folder / "small.journal", "small", SPACE)
    refined = SPACE.plan(SPACE.draw(Random(9)))
    for number in range(3):
        study.enqueue_trial(SPACE.draw(Random(number)))
        trial = study.ask()
        studies.suggest(trial, SPACE)
        attributes = {
            attrs.ORIGIN: "drawn",
            attrs.STEPS: [[0.1, 0.2], [0.3, 0.1]],
            attrs.RUN: "here",
            attrs.BATCH: number,
            attrs.REFERENCE: 0.2,
            attrs.PRICE: 0.1,
            **({attrs.REFINED: json.dumps(refined.to_dict())} if number == 1 else {}),
        }
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        study.tell(trial, 0.2)
    return ["small.journal"]


def _read_study(folder: Path) -> Use:
    path = folder / "small.journal"
    settings = TransferSettings.parse({"studies": {"small": {"storage": str(path)}}})
    target = ClusterSpec.uniform(3, bandwidth=1e7, name="uniform")
    found = load_transfer(settings, WORKLOAD, target).studies[0]
    studies.samples_of(found)
    best_points(found, PlanSpace(WORKLOAD, target))
    check(studies.open_study(path, found.study_name, SPACE), SPACE)


@lru_cache
def _world() -> World:
    return World(budget=4)


def _make_tuning_study(folder: Path) -> list[str]:
    world = copy(_world())
    world.storage = folder / "study.journal"
    trials = world.trials()
    reference = world.reference(trials)
    world.opponents(trials, reference).measure({})
    world.job.claim(trials.study)
    for number in range(2):
        trial = trials.ask()
        trials.suggest(trial)
        measurement = TrialMeasurement(Contender(f"trial_{number}", {}))
        measurement.add([[0.1, 0.2], [0.1, 0.3]])
        trials.note(trial, attrs.PRICE, 0.1)
        trials.tell(trial, measurement, number, 0.25)
    return ["study.journal"]


def _read_tuning_study(folder: Path) -> None:
    world = copy(_world())
    world.storage = folder / "study.journal"
    trials = world.trials()
    world.job.claim(trials.study)
    reference = world.reference(trials)
    opponents = world.opponents(trials, reference)
    records = trials.records()
    drift = drift_of(records, trials.own)
    json.dumps([record.model_dump(mode="json") for record in records])
    opponents.fastest("ddp", drift)
    for record, _ in ranked(records, trials.own):
        trials.plan_of(record.number)


# Results and files of runs


def _make_run(folder: Path) -> list[str]:
    write_run(folder, budget=12, journal=False)
    return ["result.json"]


def _read_run(folder: Path) -> None:
    for run in find_runs([folder]):
        json.dumps(summary_row(run))


def _read_report(folder: Path) -> None:
    report({"run": str(folder), "file": str(folder / "made.html")}, folder / "made")


def _make_timelines(folder: Path) -> list[str]:
    plan = builders.build("ps", WORKLOAD, CLUSTER)
    predicted = Replay(WORKLOAD, CLUSTER, Constants()).predict(compile_plan(plan, WORKLOAD, CLUSTER))
    save_timelines({"predicted": predicted.timeline, "measured": predicted.timeline}, folder / TIMELINES)
    return [TIMELINES]


def _read_timelines(folder: Path) -> Use:
    timelines = load_timelines(folder / TIMELINES)
    return lambda: write_trace(timelines, folder / "trace.json")


def _make_rates(folder: Path) -> list[str]:
    settings = _convergence().model_dump(mode="json")
    data = {"format": ConvergenceDocument.FORMAT, "settings": settings, "rates": {"ddp": 0.1, "own": 0.2}, "runs": []}
    write_text(folder / "result.json", json.dumps(data))
    return ["result.json"]


@lru_cache
def _convergence() -> ConvergenceSettings:
    return ConvergenceSettings.parse(_composed("converge"))


def _read_rates(folder: Path) -> None:
    load_rates(str(folder / "result.json"), _convergence())


def _make_tuned_plan(folder: Path) -> list[str]:
    TuningCache(folder).store(tuned())
    return [path.name for path in folder.iterdir()]


def _read_tuned_plan(folder: Path) -> Use:
    """As a job and ``autosync cache`` do, except that a fault is raised."""
    cache = TuningCache(folder)
    (found,) = cache.entries()
    if found.entry is None:
        raise DocumentError(found.fault)
    entry: TunedPlan = found.entry

    def use() -> None:
        nearest(tuned(bucket_bytes=7).key, CLUSTER, [entry])
        describe_tuned(entry)
        compile_plan(entry.plan, entry.key.workload, entry.cluster)

    return use


def _make_rehearsal(folder: Path) -> list[str]:
    for seed in range(2):
        run = RehearsalRun(
            PAIRS[0], "transfer", seed, [0.1, 0.2], [0.1, 0.2], ["baseline", "drawn"], 0.1, 0.1, [0.0, 0.1], PAIRS[-1]
        )
        rehearsal_runs(folder / "runs.jsonl", _REHEARSAL).append(run)
    return ["runs.jsonl"]


_REHEARSAL = RehearsalSettings(budget=2)


def _read_rehearsal(folder: Path) -> None:
    runs = rehearsal_runs(folder / "runs.jsonl", _REHEARSAL).runs.values()
    table(standings(list(runs)))


def _make_fitting(folder: Path) -> list[str]:
    settings = _fitting(_dataset())
    file = fitting_runs.run_file(folder / "runs.jsonl", settings, Constants())
    for split in settings.splits:
        for kind in settings.compare:
            accuracy = SimulatorAccuracy(0.9, 0.1, 0.8, 0.05, 0.1)
            file.append(fitting_runs.FitRun(split, 0, kind, ("star",), accuracy, 1.5))
    return ["runs.jsonl"]


def _fitting(dataset: str) -> FitSettings:
    return FitSettings.parse({"dataset": dataset, "simulator": {"kind": "linear"}, "seeds": 1})


@lru_cache
def _dataset() -> str:
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _make_dataset(Path(folder))
    return folder


def _read_fitting(folder: Path) -> None:
    file = fitting_runs.run_file(folder / "runs.jsonl", _fitting(_dataset()), Constants())
    tabulate(list(file.runs.values()))


def _make_measurements(folder: Path) -> list[str]:
    hosts = Constants().to_dict()
    one = CaseMeasurement("case", [[0.1, 0.2], [0.2, 0.3]], 0.1, "none", 1, hosts)
    append_lines(folder / "measurements.jsonl", "".join(json.dumps({**asdict(one), "key": key}) + "\n" for key in "ab"))
    return ["measurements.jsonl"]


def _read_measurements(folder: Path) -> None:
    for one in load_measurements(folder / "measurements.jsonl").values():
        assert one.seconds > 0
        assert one.noise >= 0
        hosts_of(one, Constants())


def results() -> dict[str, Result]:
    constants, accuracy = Constants().to_dict(), SimulatorAccuracy(0.9, 0.1, 0.8, 0.05, 0.1)
    runs = (fitting_runs.FitRun("trial", 0, "linear", ("star",), accuracy, 1.5),)
    rehearsed = [
        RehearsalRun(PAIRS[0], "tpe", seed, [0.1, 0.2], [0.1, 0.2], ["baseline", "drawn"], 0.1, 0.1, [0.0, 0.1])
        for seed in range(2)
    ]
    times = ((0.1, 0.2), (0.2, 0.3))
    case = {"key": "k", "cluster": "star", "family": "ncf", "kind": "free", "messages": 2, "bytes": 8}
    case |= {"measured_seconds": 0.1, "measured_noise": 0.1, "predicted_seconds": 0.1, "foreign_cores": None}
    return {
        "bench": BenchDocument(
            settings=BenchSettings.parse({"model": {"kind": "flat", "mib": 1.0}, "cluster": CLUSTER.to_dict()}),
            cluster=CLUSTER.to_dict(),
            workload=WORKLOAD.to_dict(),
            emulated={"links": False, "compute": False},
            rounds=1,
            meets_protocol=False,
            bound=Bound(0.1, 0.2, "all"),
            conditions={"cores": 2},
            foreign_cores=0.1,
            best_ddp="ddp",
            best_exact_plan=None,
            contenders={
                "ddp": ContenderDocument(
                    exactness="exact",
                    why=None,
                    median_seconds=0.1,
                    least_seconds=0.1,
                    most_seconds=0.1,
                    seconds_are="means",
                    speedup_over_best_ddp=Interval(1, 1, 1),
                    bound_share=None,
                    bytes_per_step_and_rank=8.0,
                    gradient_deviation=0.0,
                    round_seconds=(0.1,),
                    round_bytes_per_step_and_rank=(8.0,),
                    round_foreign_cores=None,
                    step_seconds_by_round_and_rank=(times,),
                )
            },
        ),
        "collect": CollectionResult(
            settings=CollectionSettings.parse({"dataset": "data", "clusters": ["star"], "families": ["ncf"]}),
            dataset="data",
            pairs=2,
            seconds=1.0,
            measured=2,
            disturbed=1,
            failed=({"plan": "why"},),
            drawing=0.1,
            measuring=0.2,
            stepping=0.1,
        ),
        "converge": _comparison(),
        "fit": FitResult(
            settings=_fitting("data"),
            constants=constants,
            dataset=FittedDataset(samples=2, clusters=("star",), families=("ncf",)),
            comparison=tabulate(runs),
            runs=runs,
            seconds={"fitting": 0.1},
        ),
        "isolation": IsolationResult(
            settings=_convergence(),
            rows=(IsolationRow("equal", "groups", GroupStatistics(0.1, 9, 1, 0.2), GroupStatistics(0.0, 9, 5, 0.1)),),
        ),
        "predict, gain": GainResult(
            workload="ncf",
            cluster="star",
            bytes=8,
            world_size=2,
            computes=True,
            reason="why",
            bounds_are="exact",
            rows=tuple(
                GainRow(kind=kind, name=kind, step_time=0.1, speedup=1.0, sent=8.0, messages=1, topologies=("ring",))
                for kind in get_args(GainKind)
            ),
            left_out={"shared_memory": "why"},
        ),
        "predict": PredictionResult(
            step_time=0.3,
            synchronization_time=0.1,
            timeline=Timeline(0.3, (MessageSpan("w", 0.1, 0.2, 0.1),), ((Span("forward", 0.0, 0.1),),), {"a > b": 0.5}),
            hosts=(0.5, 0.5),
            cores=None,
            critical_path=(Span("forward", 0.0, 0.1),),
            step_bound=0.2,
            synchronization_bound=0.1,
            bounds_are="exact",
            bound_share=2 / 3,
            binding={"a > b": 1.0},
        ),
        "predict, hybrid": HybridPredictionResult(
            plan="0123456789ab",
            step_seconds=0.3,
            seconds={"forward pass": 0.1},
            bytes=8.0,
            sent=(SentBytes("forward", (0,), "all_gather", 8.0),),
            memory={"state": 8.0, "step": 16.0},
        ),
        "report": ReportResult(report="report.html", runs=({"directory": "run", "seconds": None},)),
        "probe": ProbeDocument(
            settings={"ranks": 2},
            cluster=CLUSTER.to_dict(),
            nodes=({"name": "a", "up": 1e6},),
            own_trip=1e-5,
            pairs=({"nodes": [0, 1], "alone": [1e6, None]},),
            sharing={"opposite": 0.9, "fan": 0.8},
            burst=None,
            links=({"from": "a", "to": "b", "rate": 1e6, "latency": 1e-4},),
            constants=constants,
            costs={"copy_rate": 1e9},
            transfers=3,
            seconds=1.5,
        ),
        "rehearse": RehearsalResult(
            settings=_REHEARSAL,
            emulated={"links": False},
            standings=tuple(one.summary() for one in standings(rehearsed)),
        ),
        "train": TrainingResult(
            settings=TrainingSettings.parse({"model": {"kind": "flat", "mib": 1.0}}),
            emulated={"links": False, "compute": False},
            cluster=CLUSTER.to_dict(),
            world_size=2,
            strategy="autosync",
            plan=None,
            metrics={"loss": 0.5, "accuracy": math.nan},
            epochs=1,
            steps=2,
            seconds=1.0,
            median_step_seconds=0.1,
            step_seconds_by_rank=times,
            checkpoint=None,
        ),
        "validate": ValidationResult(
            settings=ValidationSettings(),
            constants=constants,
            emulated={"links": True},
            accuracy={"all": {"all": ReplayAccuracy(3, 0.1, 0.2, 0.0, None, 0.5, 0.1)}},
            cases=(CaseResult.model_validate(case),),
        ),
    }


def _comparison() -> ConvergenceDocument:
    settings = _convergence()
    runs = [
        TrainingRun(method, speed, 0, 0.1, 90.0, 1.0, 2.0, (3, 4), (0.1, 0.2), None, (8, 8), (1.0,), (90.0,), None)
        for method in settings.chosen_methods
        for speed in settings.chosen_speeds
    ]
    return ConvergenceResult(settings, 8, dict.fromkeys(settings.chosen_methods, 0.1), runs, [], {}).document()


def _make_results(folder: Path) -> list[str]:
    for verb, result in results().items():
        result.write(folder / verb)
    return [f"{verb}/{RESULT}" for verb in results()]


def _read_results(folder: Path) -> Use:
    found = [type(result).read(folder / verb) for verb, result in results().items()]
    return lambda: [one.to_dict() for one in found]


# Checkpoints and sweeps


def _make_checkpoint(folder: Path) -> list[str]:
    memory = {"compressor": {"kind": "topk", "ratio": 0.1}, "tensors": {"residual": torch.zeros(1, 4, 3)}}
    exact = {"format": EXACT_STATE, "world_size": 1, "variables": {"front": memory, "b": memory}}
    torch.save({STATE_KEY: exact}, folder / "exact.ckpt")
    rank = {"synchronizer": {"iteration": 3, "controller": None}, "optimizer": {"state": {}, "param_groups": []}}
    relaxed = {"format": RELAXED_FORMAT, "plan": "periodic", "ranks": {0: rank, 1: rank}}
    torch.save({STATE_KEY: relaxed}, folder / "relaxed.ckpt")
    return ["exact.ckpt", "relaxed.ckpt"]


def _read_checkpoint(folder: Path) -> None:
    exact, relaxed = (
        torch.load(folder / f"{name}.ckpt", weights_only=True)[STATE_KEY] for name in ("exact", "relaxed")
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh: Any = SimpleNamespace(rank=1)
    checkpoint = RelaxedCheckpoint(mesh, "periodic", False, 1.0)
    before, rank_zero_only.rank = getattr(rank_zero_only, "rank", 0), 1  # no warnings
    try:
        own_state(exact)
        own_state(relaxed)
        checkpoint.restore(relaxed, 3)
    finally:
        dist.destroy_process_group()
        rank_zero_only.rank = before
    synchronizer: Any = SimpleNamespace(load_state_dict=lambda state: [state["iteration"], state["controller"]])
    optimizer: Any = SimpleNamespace(load_state_dict=lambda state: [state["state"], state["param_groups"]])
    checkpoint.begin(synchronizer, optimizer, [])


_SPACE = sweep_space({}, ["seed=1,2", "rate=0.1,0.2", "cluster=four_equal"])


def _make_sweep(folder: Path) -> list[str]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = sweeps.open_study("sweep", sweeps.open_storage(None, folder), _SPACE, ["minimize"], None)
    sweeps.enqueue_grid(study, _SPACE)
    for _ in range(2):
        trial = sweeps.ask(study, folder, _SPACE)
        assert trial is not None
        for parameter in _SPACE.parameters:
            sweeps.suggest(trial, parameter)
        study.tell(trial, 1.0)
    return [sweeps.JOURNAL]


def _read_sweep(folder: Path) -> None:
    study = sweeps.open_study("sweep", sweeps.open_storage(None, folder), _SPACE, ["minimize"], None)
    sweeps.interrupted(study, folder, own=True)
    sweeps.enqueue_grid(study, _SPACE)


def _composed(verb: str) -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        return OmegaConf.to_container(compose(verb), resolve=True)


_STUDY = ("study '", "small.journal", "study.journal", "trial ", "autosync:")

KINDS: dict[str, Kind] = {
    "cluster": _cluster("own.yaml", _NODES),
    "cluster, JSON": _cluster("own.json", _NODES),
    "cluster, uniform": _cluster("own.yaml", {"uniform": {"nodes": 3, "devices": 2, "bandwidth": "1 Gbit/s"}}),
    "cluster, star": _cluster("own.yaml", {"star": {"bandwidths": ["1 Gbit/s", 1e7], "latency": "50 us"}}),
    "cluster, racks": _cluster(
        "own.yaml", {"racks": {"racks": 2, "nodes_per_rack": 2, "bandwidth": "1 GB/s", "uplink": "2 GB/s"}}
    ),
    "resource spec": Kind(_make_resource_spec, _read_resource_spec, ("cluster.files",)),
    "workload": Kind(_make_workload, _read_workload, ("workload.spec",)),
    "plan": Kind(_make_plan, _read_plan, ("plan.spec",)),
    "constants": Kind(_make_constants, _read_constants, ("replay.constants",)),
    "hybrid plan": Kind(_make_hybrid_plan, _read_hybrid_plan, ("hybrid.plan", "strategy.autoddl")),
    "hybrid rates": Kind(_make_hybrid_rates, _read_hybrid_rates, ("hybrid.rates",)),
    "hybrid tuning run": Kind(_make_hybrid_run, _read_hybrid_run, ("search.hybrid.result", "search.hybrid.trials")),
    "prediction": Kind(_make_prediction, _read_prediction, ()),
    "dataset": Kind(
        _make_dataset,
        _read_dataset,
        (
            "learned.dataset.parts",
            "learned.dataset.dataset",
            "learned.dataset.sample",
        ),
        seal=_seal_parts,
    ),
    "dataset, journal": Kind(_make_journal, _read_journal, ("learned.dataset.writer",)),
    "simulator": Kind(
        _make_simulators, _read_simulators, ("learned.simulator", "learned.ensemble"), seal=_seal_weights
    ),
    "simulator card": Kind(_make_simulator_card, _read_simulator_card, ("learned.card", "learned.pretrained")),
    "study": Kind(
        _make_study, _read_study, ("search.studies", "search.trial_attributes", "search.population"), names=_STUDY
    ),
    "study, tuning": Kind(
        _make_tuning_study,
        _read_tuning_study,
        ("search.tuning.opponents", "search.tuning.job"),
        names=_STUDY,
    ),
    "tuning run": Kind(_make_run, _read_run, ("search.tuning.result", "search.tuning.comparison")),
    "tuning run, report": Kind(_make_run, _read_report, ("report.page",), share=0.1),
    "tuned plan": Kind(
        _make_tuned_plan,
        _read_tuned_plan,
        ("search.memory.entry", "search.memory.cache"),
    ),
    "timelines": Kind(_make_timelines, _read_timelines, ("report.timeline",)),
    "rates": Kind(_make_rates, _read_rates, ("lab.convergence.result",)),
    "runs of a rehearsal": Kind(_make_rehearsal, _read_rehearsal, ("run_files", "lab.rehearsal.contest")),
    "runs of a fit": Kind(_make_fitting, _read_fitting, ("lab.fitting.comparison",)),
    "results": Kind(_make_results, _read_results, RESULTS, share=0.5),
    "checkpoint": Kind(
        _make_checkpoint,
        _read_checkpoint,
        ("strategy.checkpoint",),
        names=("checkpoint: ",),
    ),
    "study, sweep": Kind(_make_sweep, _read_sweep, ("search.journal",), names=("study 'sweep'",)),
    "measurements": Kind(_make_measurements, _read_measurements, ("lab.validation.measuring",)),
}
