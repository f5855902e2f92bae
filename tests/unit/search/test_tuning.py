"""A tuning run without workers: its study, its failures, its settings, its samplers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.trial import create_trial
from priced_session import PricedSession
from tuning_world import CLUSTER, MODEL, World, result_of, settings

from lightning_autosync.documents import write_data
from lightning_autosync.errors import DocumentError, TuningError
from lightning_autosync.measure import session as measurement_session
from lightning_autosync.measure.workers import LaunchError, WorkerError
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace
from lightning_autosync.search import storages, studies
from lightning_autosync.search import trial_attributes as attrs
from lightning_autosync.search.tuning.job import PriorKnowledge, TuningJob
from lightning_autosync.search.tuning.opponents import builder_plans
from lightning_autosync.search.tuning.records import TrialRecord, ranked
from lightning_autosync.search.tuning.result import Best, TuningResult
from lightning_autosync.search.tuning.samplers import BUCKET, BucketSpace, make_sampler
from lightning_autosync.search.tuning.settings import TuningSettings
from lightning_autosync.search.tuning.trials import Trials


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def test_a_run_spends_its_budget_on_builders_first():
    world = World()
    trials = world.trials()
    tuner = world.tuner(trials)
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
    assert world.session.restarts == 0


@pytest.mark.parametrize("baselines", [True, False])
def test_a_builder_many_times_slower_than_the_reference_ends_at_once_in_the_first_batch(baselines):
    world = World(budget=3, baselines=baselines)
    _, slow, *_ = builder_plans(world.job).values()
    world.prices[slow.fingerprint] = 50 * world.plan_price(slow)
    trials = world.trials()
    world.tuner(trials).run()
    record = trials.records()[1]
    assert record.plan == slow.fingerprint
    if baselines:
        assert (record.state, len(record.steps[0])) == ("pruned", 1)
        assert str(record.error).endswith("times the reference's")
    else:
        assert "reference" not in str(record.error)


def test_a_result_has_the_means_of_ranks_only():
    steps = [[1.0, 1.5], [2.0, 2.5], [], [1.0, 9.0]]
    trial = create_trial(value=5.0, user_attrs={attrs.STEPS: steps})
    assert TrialRecord.of(trial).steps == ((pytest.approx(4 / 3), pytest.approx(13 / 3)),)
    assert TrialRecord.of(create_trial(value=5.0)).steps == ()


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


def test_failed_plans_are_failed_trials_and_too_many_end_the_run():
    world = World(max_failures=6)

    def breaks(name: str, order: Mapping[str, Any]) -> float:
        number = int(name.split()[1]) if name.startswith("trial") else 0
        return float("inf") if number == 3 or number >= 9 else world.price(name, order)

    world.session = PricedSession(breaks)
    trials = world.trials()
    with pytest.raises(TuningError, match="the last 6 trials failed; latest error: rank 1 died while trial 14"):
        world.tuner(trials).run()
    records = trials.records()
    assert [record.number for record in records if record.state == "failed"] == [3, *range(9, 15)]
    assert records[3].error == "rank 1 died while trial 3 ran"
    assert records[3].seconds is None


@pytest.mark.parametrize("name", ["random", "tpe", "gp", "autosync"])
def test_samplers_by_name_propose_plans_that_compile(name):
    world = World(sampler=name, options={"population": 24} if name == "autosync" else {})
    study = studies.open_study(
        world.storage,
        name,
        world.space,
        sampler=make_sampler(world.settings.search, world.space, PriorKnowledge.of(world.job)),
    )
    trials = Trials(study, world.space, name, "here")
    for number in range(11):  # those of Optuna draw their first ten at random
        trial = trials.ask()
        trials.suggest(trial)
        compile_plan(trials.plan(trial), world.job.workload, world.job.cluster)
        study.tell(trial, 0.1 + 0.01 * number)
    if name != "autosync":
        assert {trial.params[BUILDER] for trial in study.get_trials()} == {COMPOSED}


def test_horovod_searches_the_size_of_buckets_alone(tmp_path):
    job = TuningJob.of(settings(sampler="horovod"))
    space = BucketSpace(job.workload, job.cluster)
    sampler = make_sampler(job.settings.search, space, PriorKnowledge.of(job))
    study = studies.open_study(str(tmp_path / "a.journal"), "tune", space, sampler=sampler)  # type: ignore[arg-type]
    trials = Trials(study, space, "horovod", "here")
    sizes = []
    for _ in range(4):
        trial = trials.ask()
        trials.suggest(trial)
        plan = trials.plan(trial)
        sizes.append(trial.params[BUCKET])
        assert {group.topology for group in plan.groups} == {"native"}
        study.tell(trial, 0.1)
    assert len(set(sizes)) == 4
    assert len(space.plan({BUCKET: 64.0}).groups) < len(space.plan({BUCKET: 1 / 16}).groups)


def test_the_median_counts_of_a_plan_that_was_tried_several_times():
    def record(number: int, plan: str, seconds: float) -> TrialRecord:
        return TrialRecord(number=number, origin="random", state="complete", seconds=seconds, plan=plan, batch=0)

    found = ranked([record(0, "a", 1.0), record(1, "b", 2.0), record(2, "a", 9.0), record(3, "a", 4.0)])
    assert [(one.plan, one.number, seconds) for one, seconds in found] == [("b", 1, 2.0), ("a", 0, 4.0)]


def test_an_interrupted_outcome_tells_what_there_is():
    world = World(budget=13)
    trials = world.trials()
    world.tuner(trials).run()
    records = trials.records()
    fastest, seconds = ranked(records)[0]
    plan = trials.plan_of(fastest.number).to_dict()
    best = Best(number=fastest.number, origin=fastest.origin, seconds=seconds, plan=plan, builder=fastest.builder)
    result = result_of(world.job, trials=tuple(records), best=best, interrupted=True)
    data = json.loads(json.dumps(result.to_dict()))
    assert TuningResult.from_dict(data) == result
    assert data["format"] == "autosync-tuning/1"
    assert data["best"]["number"] == fastest.number
    assert SyncPlan.from_dict(data["best"]["plan"]).fingerprint == fastest.plan
    assert len(data["trials"]) == 13
    assert data["final"] is None
    assert any("it was not compared" in line for line in result.lines())


WRONG = [
    ({"search": {"sampler": "magic"}}, "search.sampler: .*allowed: autosync, random, tpe, gp, horovod"),
    ({"search": {"budget": 0}}, "search.budget: .*greater than 0"),
    (
        {"search": {"sampler": "tpe", "options": {"population": 3}}},
        "search: options: allowed with sampler 'autosync' only",
    ),
    ({"search": {"options": {"colour": 1}}}, "search: options: colour: not known; allowed: population, batch"),
    ({"search": {"options": {"batch": 2.5}}}, "search: options: batch: must be an integer of 1 or more, got 2.5"),
    (
        {"search": {"sampler": "gp"}, "transfer": {"simulator": "x"}},
        "transfer: allowed with sampler 'autosync' only, not 'gp'",
    ),
    (
        {"search": {"sampler": "tpe"}, "simulator": {"kind": "linear"}},
        "simulator: allowed with sampler 'autosync' only",
    ),
    ({"contenders": {"ps": {"builder": "ps"}}}, "contenders: 'ps' is reserved for finalists"),
    ({"trial": {"min_steps": 9, "max_steps": 3}}, "trial: max_steps: 3 is less than min_steps, 9"),
    ({"trial": {"max_slowdown": 1}}, "trial.max_slowdown: .*greater than 1"),
    ({"semantics": "relaxed"}, "semantics: 'relaxed' is not known; allowed: exact, compressed"),
    ({"launch": {"kind": "emulated"}, "cluster": None}, "cluster: missing; launch=emulated needs one"),
    ({"timeline": True}, "timeline: "),
    ({"study": {"name": ""}}, "study.name: "),
    ({"speed": 3}, "speed: unknown field"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_settings(changes, message):
    with pytest.raises(DocumentError, match=message) as caught:
        TuningSettings.parse({"model": MODEL, "cluster": CLUSTER.to_dict(), **changes})
    assert "\n" not in str(caught.value)


def test_wrong_simulators_and_sources(tmp_path):
    def sources(**given: Any) -> PriorKnowledge:
        return PriorKnowledge.of(
            TuningJob.of(TuningSettings.parse({"model": MODEL, "cluster": CLUSTER.to_dict(), **given}))
        )

    with pytest.raises(DocumentError, match=r"simulator.kind: .*oracle.*replay, linear"):
        sources(simulator={"kind": "oracle"})
    with pytest.raises(DocumentError, match=r"transfer.simulator: .*missing"):
        sources(transfer={"simulator": str(tmp_path / "missing")})
    with pytest.raises(DocumentError, match=r"transfer.studies.old: .*this journal file does not exist"):
        sources(transfer={"studies": {"old": {"storage": str(tmp_path / "old.journal")}}})


def test_what_is_wrong_with_a_source_is_no_fault_of_the_options(tmp_path):
    old, new = World(tmp_path), World(sampler="autosync")
    study = old.trials().study
    trial = study.ask()
    studies.suggest(trial, old.space)
    trial.set_user_attr(attrs.REFINED, "no plan")
    trial.set_user_attr(attrs.STEPS, [[0.1]])
    study.tell(trial, 0.1)
    sources = replace(PriorKnowledge.of(new.job), studies=[studies.load_study(old.storage, "tune")])
    with pytest.raises(storages.StudyError, match=r"^trial 0: autosync:refined: not valid JSON: "):
        make_sampler(new.settings.search, new.space, sources)


def test_a_simulator_of_another_format_version_is_refused(tmp_path):
    write_data(tmp_path / "simulator.json", {"format": "autosync-simulator/99", "kind": "replay"})
    given = {"model": MODEL, "cluster": CLUSTER.to_dict(), "transfer": {"simulator": str(tmp_path)}}
    with pytest.raises(DocumentError, match="autosync-simulator/99' was written by a newer release") as caught:
        PriorKnowledge.of(TuningJob.of(TuningSettings.parse(given)))
    assert "\n" not in str(caught.value)


def test_a_study_of_another_space_is_refused():
    other = World()
    other.trials()
    smaller = other.job.workload.model_copy(update={"variables": other.job.workload.variables[:-2]})
    other.space = PlanSpace(smaller, other.job.cluster)
    with pytest.raises(storages.StudyError, match="study 'tune': it has another workload") as caught:
        other.trials()
    assert "\n" not in str(caught.value)


def test_workers_that_do_not_start_twice_end_the_search_and_say_so(monkeypatch):
    def start(*asked: Any, **given: Any) -> Any:
        raise WorkerError("did not answer", rank=1)

    monkeypatch.setattr(measurement_session, "WorkerPool", start)
    world = World()
    with (
        world.job.session() as session,
        pytest.raises(LaunchError, match=r"workers did not start at the second attempt: .*did not answer"),
    ):
        session.measure(measurement_session.Contender("trial 0", {}), 1)
