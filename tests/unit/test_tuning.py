"""A tuning run without workers: its study, its failures, its interruptions, its samplers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from tuning_stage import PricedStage

from lightning_autosync.bench.validation.clusters import emulable
from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.documents import write_data
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace
from lightning_autosync.search import studies
from lightning_autosync.search.tuning.buckets import PARAMETER, BucketSpace
from lightning_autosync.search.tuning.job import Job
from lightning_autosync.search.tuning.opponents import Opponent, best_builder, best_ddp
from lightning_autosync.search.tuning.result import Best, Outcome, Pace
from lightning_autosync.search.tuning.samplers import make_sampler
from lightning_autosync.search.tuning.settings import Settings
from lightning_autosync.search.tuning.sources import Sources
from lightning_autosync.search.tuning.trials import Record, Trials, drift_of, ranked
from lightning_autosync.search.tuning.tuner import Tuner, TuningError
from lightning_autosync.simulator import Replay
from lightning_autosync.simulator.learned import Estimator

MODEL = {"kind": "paced", "catalogue": "vgg16", "scale": 0.002, "compute": "20 ms"}
CLUSTER = emulable(resolve_cluster("fat_node_star"), 50e6)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def settings(**search: Any) -> Settings:
    given = {"sampler": "random", "budget": 16, "batch": 3, **search}
    return Settings.parse({"model": MODEL, "cluster": CLUSTER.to_dict(), "search": given})


class World:
    """A job whose steps take what the replay says, times a factor that a test may change."""

    def __init__(self, folder: Path | None = None, **search: Any) -> None:
        self.settings = settings(**search)
        self.job = Job.of(self.settings)
        self.space = PlanSpace(self.job.workload, self.job.cluster)
        self.replay = Replay(self.job.workload, self.job.cluster)
        self.factor = 1.0
        self.stage = PricedStage(self.price)
        self.storage = optuna.storages.InMemoryStorage() if folder is None else str(folder / "study.journal")
        self.prices: dict[str, float] = {}

    def price(self, name: str, order: Mapping[str, Any]) -> float:
        if "ddp" in order:
            return 0.4
        if name not in self.prices:
            schedule = compile_plan(SyncPlan.from_dict(order["plan"]), self.job.workload, self.job.cluster)
            self.prices[name] = self.replay.predict(schedule, "fluid").step_time
        return self.factor * self.prices[name]

    def trials(self) -> Trials:
        sampler = make_sampler(self.settings.search, self.space, Sources.of(self.job))
        study = studies.open_study(self.storage, "tune", self.space, sampler=sampler)
        studies.enqueue_baselines(study, self.space)
        return Trials(study, self.space, self.settings.search.sampler, "here", alone=True)

    def tuner(self, trials: Trials, estimator: Estimator | None = None) -> Tuner:
        return Tuner(self.job, self.stage, trials, Opponent("ddp", 0.4), estimator)  # type: ignore[arg-type]


def test_a_run_spends_its_budget_on_builders_first():
    world = World()
    trials = world.trials()
    tuner = world.tuner(trials, Sources.of(world.job).estimator)
    tuner.run()
    records = trials.records()
    builders = len(world.space.baselines())
    assert [record.number for record in records] == list(range(16))
    assert [record.origin for record in records] == ["baseline"] * builders + ["random"] * (16 - builders)
    assert all(record.state in ("complete", "pruned") for record in records)
    assert all(record.predicted and record.seconds and record.elapsed is not None for record in records)
    assert {trial.params[BUILDER] for trial in trials.finished()[builders:]} == {COMPOSED}
    assert len(trials.proposals) == 16
    assert tuner.trials_per_minute is not None
    best = ranked(records)
    assert best[0][1] == min(record.seconds for record in records if record.state == "complete")
    assert world.stage.restarts == 0


def test_what_was_measured_is_in_the_study_for_whoever_learns_from_it():
    world = World()
    trials = world.trials()
    world.tuner(trials).run()
    samples = studies.samples_of(trials.study)
    records = trials.records()
    assert len(samples) == 16
    pruned = [(sample, record) for sample, record in zip(samples, records, strict=True) if record.state == "pruned"]
    assert pruned
    assert all(sample.seconds == pytest.approx(record.seconds) for sample, record in pruned)
    values = [trial.intermediate_values for trial in trials.finished() if trial.state == optuna.trial.TrialState.PRUNED]
    assert all(len(value) == 1 for value in values)


def test_a_run_goes_on_with_its_study_and_ends_what_was_left_running(tmp_path):
    world = World(tmp_path, budget=14)
    trials = world.trials()
    world.tuner(trials).run()
    trials.study.ask()
    longer = World(tmp_path, budget=18)
    again = longer.trials()
    assert again.settle() == 1
    assert again.records()[-1].error == "interrupted"
    longer.tuner(again).run()
    assert len(again.records()) == 18
    assert sum(record.origin == "baseline" for record in again.records()) == len(world.space.baselines())


def test_the_reference_shows_drift_and_ranking_follows_it():
    world = World(budget=15, batch=1)
    trials = world.trials()
    world.tuner(trials).run()
    assert not drift_of(trials.records()).seen
    slow = World(budget=20, batch=1)
    slow.storage, slow.factor = world.storage, 2.0
    again = slow.trials()
    slow.tuner(again).run()
    records = again.records()
    drift = drift_of(records)
    assert drift.seen
    assert drift.spread == pytest.approx(1.0, abs=0.01)
    assert drift.corrected(0, 1.0) == pytest.approx(2 * drift.corrected(19, 1.0))


def test_an_interruption_leaves_no_trial_running_and_keeps_the_rest():
    world = World()

    def interrupted(name: str, order: Mapping[str, Any]) -> float:
        if name == "trial 7":
            raise KeyboardInterrupt
        return world.price(name, order)

    world.stage = PricedStage(interrupted)
    trials = world.trials()
    with pytest.raises(KeyboardInterrupt):
        world.tuner(trials).run()
    assert not trials.study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    states = [record.state for record in trials.records()]
    assert states[6:9] == ["failed"] * 3
    assert "failed" not in states[:6]
    assert trials.records()[7].error == "interrupted"


def test_failed_plans_are_failed_trials_and_too_many_end_the_run():
    world = World(failures=6)

    def breaks(name: str, order: Mapping[str, Any]) -> float:
        number = int(name.split()[1]) if name.startswith("trial") else 0
        return float("inf") if number == 3 or number >= 9 else world.price(name, order)

    world.stage = PricedStage(breaks)
    trials = world.trials()
    with pytest.raises(TuningError, match="the last 6 trials failed, the latest one so: rank 1 died while trial 14"):
        world.tuner(trials).run()
    records = trials.records()
    assert [record.number for record in records if record.state == "failed"] == [3, *range(9, 15)]
    assert records[3].error == "rank 1 died while trial 3 ran"
    assert records[3].seconds is None


def test_ddp_and_builders_are_measured_beside_the_study():
    world = World()
    assert best_ddp(world.job, world.stage).seconds == pytest.approx(0.4 * 1.01)  # type: ignore[arg-type]
    found = best_builder(world.job, world.stage)  # type: ignore[arg-type]
    plans = {str(point[BUILDER]): world.space.plan(point) for point in world.space.baselines()}
    prices = {name: world.price(name, {"plan": plan.to_dict()}) for name, plan in plans.items()}
    assert found.name == min(prices, key=prices.__getitem__)


def test_opponents_that_all_fail_say_why():
    world = World()
    world.stage = PricedStage(lambda *_: float("inf"))
    with pytest.raises(DocumentError, match="ddp: none of them ran; ddp: rank 1 died while ddp ran"):
        best_ddp(world.job, world.stage)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["random", "tpe", "gp", "autosync"])
def test_samplers_by_name_propose_plans_that_compile(name):
    world = World(sampler=name, options={"population": 40} if name == "autosync" else {})
    study = studies.open_study(
        world.storage,
        name,
        world.space,
        sampler=make_sampler(world.settings.search, world.space, Sources.of(world.job)),
    )
    trials = Trials(study, world.space, name, "here")
    for _ in range(3):
        trial = trials.ask()
        compile_plan(trials.plan(trial), world.job.workload, world.job.cluster)
        study.tell(trial, 0.1)
    if name != "autosync":
        assert {trial.params[BUILDER] for trial in study.get_trials()} == {COMPOSED}


def test_horovod_searches_the_size_of_buckets_alone(tmp_path):
    job = Job.of(settings(sampler="horovod"))
    space = BucketSpace(job.workload, job.cluster)
    sampler = make_sampler(job.settings.search, space, Sources.of(job))
    study = studies.open_study(str(tmp_path / "a.journal"), "tune", space, sampler=sampler)  # type: ignore[arg-type]
    trials = Trials(study, space, "horovod", "here")
    sizes = []
    for _ in range(4):
        trial = trials.ask()
        plan = trials.plan(trial)
        sizes.append(trial.params[PARAMETER])
        assert {group.topology for group in plan.groups} == {"native"}
        study.tell(trial, 0.1)
    assert len(set(sizes)) == 4
    assert len(space.plan({PARAMETER: 64.0}).groups) < len(space.plan({PARAMETER: 1 / 16}).groups)


def test_the_median_counts_of_a_plan_that_was_tried_several_times():
    def record(number: int, plan: str, seconds: float) -> Record:
        return Record(number, "random", "complete", seconds, None, [[seconds]], 0.1, None, None, plan, None, 0)

    found = ranked([record(0, "a", 1.0), record(1, "b", 2.0), record(2, "a", 9.0), record(3, "a", 4.0)])
    assert [(one.plan, one.number, seconds) for one, seconds in found] == [("b", 1, 2.0), ("a", 0, 4.0)]


def test_an_interrupted_outcome_tells_what_there_is():
    world = World(budget=13)
    trials = world.trials()
    world.tuner(trials).run()
    records = trials.records()
    fastest, seconds = ranked(records)[0]
    best = Best(fastest.number, fastest.origin, seconds, trials.plan_of(fastest.number), fastest.builder)
    pace = Pace(60.0, trials.proposals, 13.0, 0)
    outcome = Outcome(
        world.job, "study.journal", records, Opponent("ddp", 0.4), None, best, None, pace, interrupted=True
    )
    data = outcome.to_dict()
    assert data["format"] == "autosync-tuning/1"
    assert data["best"]["number"] == fastest.number
    assert SyncPlan.from_dict(data["best"]["plan"]).fingerprint == fastest.plan
    assert len(data["trials"]) == 13
    assert data["final"] is None
    assert any("hydra.run.dir" in line for line in outcome.lines())


WRONG = [
    ({"search": {"sampler": "magic"}}, "search.sampler: .*'autosync', 'random', 'tpe', 'gp' or 'horovod'"),
    ({"search": {"budget": 0}}, "search.budget: .*greater than 0"),
    ({"search": {"sampler": "tpe", "options": {"population": 3}}}, "search: options: are of the sampler 'autosync'"),
    ({"trial": {"least": 9, "most": 3}}, "trial: most: 3 is below least, 9"),
    ({"trial": {"hopeless": 1}}, "trial.hopeless: .*greater than 1"),
    ({"semantics": "relaxed"}, "semantics: .*'exact' or 'compressed'"),
    ({"launch": {"kind": "emulated"}, "cluster": None}, "cluster: missing; launch=emulated needs one"),
    ({"timeline": True}, "timeline: "),
    ({"study": {"name": ""}}, "study.name: "),
    ({"speed": 3}, "speed: unknown field"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_settings(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        Settings.parse({"model": MODEL, "cluster": CLUSTER.to_dict(), **changes})
    assert "\n" not in str(caught.value)


def test_wrong_simulators_sources_and_arguments_of_samplers(tmp_path):
    def sources(**given: Any) -> Sources:
        return Sources.of(Job.of(Settings.parse({"model": MODEL, "cluster": CLUSTER.to_dict(), **given})))

    with pytest.raises(DocumentError, match=r"simulator.kind: .*oracle.*replay, linear"):
        sources(simulator={"kind": "oracle"})
    with pytest.raises(DocumentError, match=r"transfer.simulator: .*missing"):
        sources(transfer={"simulator": str(tmp_path / "missing")})
    with pytest.raises(DocumentError, match=r"transfer.studies.old: .*there is no such journal"):
        sources(transfer={"studies": {"old": {"storage": str(tmp_path / "old.journal")}}})
    world = World(tmp_path, sampler="autosync", options={"colour": 1})
    with pytest.raises(DocumentError, match=r"search.options: .*colour"):
        world.trials()


def test_a_simulator_of_another_format_version_is_refused(tmp_path):
    write_data(tmp_path / "simulator.json", {"format": "autosync-simulator/99", "kind": "replay"})
    given = {"model": MODEL, "cluster": CLUSTER.to_dict(), "transfer": {"simulator": str(tmp_path)}}
    with pytest.raises(DocumentError, match="autosync-simulator/99' was written by a newer release") as caught:
        Sources.of(Job.of(Settings.parse(given)))
    assert "\n" not in str(caught.value)


def test_a_study_of_another_space_is_refused():
    other = World()
    other.trials()
    smaller = other.job.workload.model_copy(update={"variables": other.job.workload.variables[:-2]})
    other.space = PlanSpace(smaller, other.job.cluster)
    with pytest.raises(studies.StudyError, match="study 'tune': it is of another workload") as caught:
        other.trials()
    assert "\n" not in str(caught.value)
