"""A tuning run that was broken off: what is kept, what is tried again, and how the command ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import optuna
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from locks import held_elsewhere
from omegaconf import OmegaConf
from optuna.trial import TrialState
from priced_session import PricedSession
from sweeps import sweep
from tuning_world import World, configuration

from lightning_autosync.cli import tune as verb
from lightning_autosync.cli.tune import Interrupted, tune
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import TuningError
from lightning_autosync.interrupts import STATUS
from lightning_autosync.learned import ReplayEstimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.plan.space import BUILDER
from lightning_autosync.search import storages
from lightning_autosync.search.journal import Journal
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.trial_attributes import RUN
from lightning_autosync.search.tuning import run as tuning_run
from lightning_autosync.search.tuning.job import JOB, TuningJob
from lightning_autosync.search.tuning.settings import TuningSettings
from lightning_autosync.search.tuning.trials import OWNER, has_ended, this_process
from lightning_autosync.workload import Workload


@pytest.fixture
def heard_ctrl_c() -> Iterator[None]:
    """A process that a shell put in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(world: World, broken: str, interrupted: str) -> PricedSession:
    """A session on which one trial kills a worker and another meets a Ctrl-C."""

    def price(name: str, order: Mapping[str, Any]) -> float:
        if name == interrupted:
            raise KeyboardInterrupt
        return float("inf") if name == broken else world.price(name, order)

    return PricedSession(price)


def test_an_interruption_leaves_no_trial_running_and_keeps_the_rest():
    world = World()
    world.session = interrupted_at(world, "none", "trial 6")
    trials = world.trials()
    with pytest.raises(KeyboardInterrupt):
        world.tuner(trials).run()
    assert not trials.study.get_trials(states=(TrialState.RUNNING,))
    records = trials.records()
    assert [record.state for record in records][6:9] == ["failed"] * 3
    assert "failed" not in [record.state for record in records][:6]
    assert [record.error for record in records][6:9] == ["interrupted"] * 3
    assert [record.interrupted for record in records] == [False] * 6 + [True] * 3


@pytest.mark.usefixtures("heard_ctrl_c")
@pytest.mark.parametrize(("method", "ended"), [("ask", 1), ("tell", 3)])
def test_a_ctrl_c_waits_until_the_study_is_in_order(method, ended, tmp_path, monkeypatch):
    world = World(tmp_path)
    trials = world.trials()
    original = getattr(trials.study, method)

    def signalled(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(trials.study, method, signalled)
    with pytest.raises(KeyboardInterrupt):
        world.tuner(trials).run()
    assert not trials.study.get_trials(states=(TrialState.RUNNING,))
    assert [record.interrupted for record in trials.records()] == [method == "ask"] * ended


class Interrupting:
    """A simulator that meets a Ctrl-C while it is trained."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.estimate = ReplayEstimator().estimate

    def fit(self, samples: Sequence[Sample]) -> None:
        self.begun += 1
        signal.raise_signal(signal.SIGINT)
        self.ended += 1


@pytest.mark.slow
@pytest.mark.usefixtures("heard_ctrl_c")
def test_a_ctrl_c_does_not_wait_for_a_simulator_that_is_trained(tmp_path):
    builders = len(World().space.baselines())
    world, simulator = World(tmp_path, batch=builders), Interrupting()
    trials = world.trials()
    trials.study.sampler = AutoSyncSampler(world.space, estimator=simulator, seed=0, population=40, refit=5)
    with pytest.raises(KeyboardInterrupt):
        world.tuner(trials).run()
    assert (simulator.begun, simulator.ended) == (1, 0)
    assert not trials.study.get_trials(states=(TrialState.RUNNING,))
    assert [record.origin for record in trials.records()[:builders]] == ["baseline"] * builders
    assert [record.interrupted for record in trials.records()] == [False] * builders + [True]
    again = World(tmp_path)
    resumed = again.trials()
    again.tuner(resumed).run()
    assert sum(not record.interrupted for record in resumed.records()) == 16


def test_builders_that_were_interrupted_are_tried_again_and_those_that_failed_are_not(tmp_path):
    world = World(tmp_path)
    world.session = interrupted_at(world, "trial 3", "trial 4")
    trials = world.trials()
    with pytest.raises(KeyboardInterrupt):
        world.tuner(trials).run()
    failed, *broken_off = trials.records()[3:6]
    assert (failed.error, failed.interrupted) == ("rank 1 died while trial 3 ran", False)
    assert [record.interrupted for record in broken_off] == [True, True]
    again = World(tmp_path)
    resumed = again.trials()
    again.tuner(resumed).run()
    names = [str(point[BUILDER]) for point in again.space.baselines()]
    tried = Counter(trial.params[BUILDER] for trial in resumed.finished() if trial.params[BUILDER] in names)
    assert tried == {name: 2 if number in (4, 5) else 1 for number, name in enumerate(names)}
    measured = {record.builder for record in resumed.records() if record.state != "failed"}
    assert measured >= set(names) - {names[3]}


@pytest.mark.slow
def test_what_a_killed_run_left_running_is_tried_again(tmp_path):
    world = World(tmp_path, budget=14)
    trials = world.trials()
    left = trials.ask()
    trials.suggest(left)
    builder = left.params[BUILDER]
    longer = World(tmp_path, budget=18)
    again = longer.trials()
    (record,) = again.records()
    assert (record.error, record.interrupted) == ("interrupted", True)
    longer.tuner(again).run()
    assert sum(not record.interrupted for record in again.records()) == 18
    assert [record.state != "failed" for record in again.records() if record.builder == builder] == [False, True]
    assert sum(record.origin == "baseline" for record in again.records()) == len(world.space.baselines()) + 1


def test_of_other_processes_only_the_trials_of_dead_ones_are_ended():
    storage = optuna.storages.InMemoryStorage()
    other = World(storage=storage).trials(run="other", alone=False)
    alive, dead, elsewhere, own = (other.ask() for _ in range(4))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    place = this_process().partition("@")[2]
    dead.set_user_attr(OWNER, f"{int(ended.stdout)}@{place}")
    elsewhere.set_user_attr(OWNER, f"{int(ended.stdout)}@another machine")
    own.set_user_attr(RUN, "here")
    here = World(storage=storage).trials(run="here", alone=False)
    states = {trial.number: trial.state for trial in here.study.get_trials()}
    assert {number for number, state in states.items() if state == TrialState.FAIL} == {dead.number, own.number}
    assert states[alive.number] == states[elsewhere.number] == TrialState.RUNNING


def test_a_process_that_had_the_same_number_is_gone():
    number, _, place = this_process().partition("@")
    assert not has_ended(f"{number}@{place}")
    assert has_ended(f"{number.partition('.')[0]}.1@{place}")


def test_a_run_that_another_process_is_at_work_on_is_refused(tmp_path, monkeypatch):
    world = World()
    with_session(monkeypatch, world, PricedSession(world.price))
    refusal = pytest.raises(TuningError, match=f"{tmp_path}: another process uses this run directory")
    with held_elsewhere(tmp_path / ".tune.lock"), refusal:
        tune(configuration(), tmp_path)
    tune(configuration(), tmp_path)


def with_session(monkeypatch: pytest.MonkeyPatch, world: World, session: PricedSession) -> list[dict[str, Any]]:
    """Runs are on that session; the final comparison only notes what it was asked for, and no report is written."""
    asked: list[dict[str, Any]] = []

    def compare(job: Any, session: Any, plans: Any, rivals: Any, directory: Any) -> None:
        asked.append({"plans": list(plans), "rivals": rivals})

    monkeypatch.setattr(TuningJob, "session", lambda self: session)
    monkeypatch.setattr(tuning_run, "compare", compare)
    monkeypatch.setattr(verb, "_trace", lambda *asked: None)
    monkeypatch.setattr(verb, "write_report", lambda *asked: None)
    return asked


def test_after_a_ctrl_c_the_command_ends_with_130_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    world = World()
    with_session(monkeypatch, world, interrupted_at(world, "none", "trial 6"))
    with pytest.raises(Interrupted) as caught:
        tune(configuration(), tmp_path)
    assert caught.value.code == STATUS == 130
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["interrupted"]
    assert len(found["trials"]) == 9
    plan = SyncPlan.load(tmp_path / "plan.yaml")
    assert plan.to_dict() == found["best"]["plan"]
    compile_plan(plan, Workload.load(tmp_path / "workload.yaml"), ClusterSpec.load(tmp_path / "cluster.yaml"))
    printed = capsys.readouterr().out
    assert f"hydra.run.dir={tmp_path}" in printed
    given, told = f"plan='{tmp_path}/plan.yaml', cluster='{tmp_path}/cluster.yaml'", printed.splitlines()
    assert f"to train this model with the plan: Trainer(strategy=AutoSyncStrategy({given}), ...)" in told
    words = " ".join(f"{name}={tmp_path}/{name}.yaml" for name in ("plan", "cluster", "workload"))
    assert f"to predict a step with it and draw that: autosync predict {words}" in told
    with_session(monkeypatch, world, PricedSession(world.price))
    outcome = tune(configuration(), tmp_path)
    assert sum(not record.interrupted for record in outcome.result.trials) == 16
    assert not outcome.result.interrupted


def test_a_ctrl_c_while_a_step_is_traced_leaves_the_report_before_another_run_may_begin(tmp_path, monkeypatch, capsys):
    world, events = World(), []
    with_session(monkeypatch, world, PricedSession(world.price))

    @contextmanager
    def locked(directory):
        events.append("locked")
        yield
        events.append("free")

    def trace(*given):
        events.append("trace")
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "_locked", locked)
    monkeypatch.setattr(verb, "_trace", trace)
    monkeypatch.setattr(verb, "write_report", lambda *given: events.append("report"))
    with pytest.raises(Interrupted):
        tune(configuration(), tmp_path)
    assert events == ["locked", "trace", "report", "free"]
    printed = capsys.readouterr().out
    assert f"interrupted; to resume, run the same command with hydra.run.dir={tmp_path}" in printed
    assert "to train this model with the plan" in printed


def test_a_search_that_cannot_go_on_leaves_what_it_found(tmp_path, monkeypatch):
    world = World()

    def price(name: str, order: Mapping[str, Any]) -> float:
        if name == "trial 13":
            raise LaunchError("no worker can be started any more")
        return world.price(name, order)

    with_session(monkeypatch, world, PricedSession(price))
    with pytest.raises(TuningError, match="no worker can be started any more; the results so far"):
        tune(configuration(), tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["failure"] == "no worker can be started any more"
    assert not found["interrupted"]
    assert SyncPlan.load(tmp_path / "plan.yaml").to_dict() == found["best"]["plan"]
    with_session(monkeypatch, world, PricedSession(world.price))
    assert tune(configuration(), tmp_path).result.failure is None


def test_a_storage_that_answers_no_more_leaves_what_was_read_from_it(tmp_path, monkeypatch):
    world = World()

    def price(name: str, order: Mapping[str, Any]) -> float:
        if name == "trial 13":
            monkeypatch.setattr(Journal, "append_logs", full)
            monkeypatch.setattr(Journal, "read_logs", full)
        return world.price(name, order)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with_session(monkeypatch, world, PricedSession(price))
    with pytest.raises(TuningError, match=r"storage does not answer: OSError: .*No space left.*; the results so far"):
        tune(configuration(), tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    assert [trial["number"] for trial in found["trials"] if trial["state"] != "failed"] == list(range(12))
    assert SyncPlan.load(tmp_path / "plan.yaml").to_dict() == found["best"]["plan"]
    monkeypatch.undo()
    with_session(monkeypatch, world, PricedSession(world.price))
    assert tune(configuration(), tmp_path).result.failure is None


def test_within_a_sweep_it_is_the_sweep_that_goes_on(tmp_path, monkeypatch, capsys):
    world = World()
    with_session(monkeypatch, world, interrupted_at(world, "none", "ddp"))
    swept = OmegaConf.create({"hydra": {"mode": RunMode.MULTIRUN, "sweep": {"dir": str(tmp_path)}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", swept)
    with pytest.raises(Interrupted):
        tune(configuration(), tmp_path / "0")
    assert f"the same command with hydra.sweep.dir={tmp_path}\n" in capsys.readouterr().out


def test_a_ctrl_c_before_the_first_trial_ends_likewise_and_writes_nothing(tmp_path, monkeypatch, capsys):
    world = World()
    with_session(monkeypatch, world, interrupted_at(world, "none", "ddp"))
    with pytest.raises(Interrupted) as caught:
        tune(configuration(), tmp_path)
    assert caught.value.code == 130
    assert not (tmp_path / "result.json").exists()
    printed = capsys.readouterr().out
    assert f"before the first result; to resume, run the same command with hydra.run.dir={tmp_path}" in printed


def test_a_builder_that_was_given_up_beside_a_faster_plan_may_still_be_the_best_builder(tmp_path, monkeypatch):
    unsteady = cycle((0.05, 0.056, 0.053))

    def price(name: str, order: Mapping[str, Any]) -> float:
        return next(unsteady) if name == "trial 9" else 0.03 if name == "trial 11" else 0.06

    asked = with_session(monkeypatch, World(), PricedSession(price))
    tune(configuration(batch=4, budget=12), tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    given_up = found["trials"][9]
    assert given_up["state"] == "pruned"
    assert given_up["builder"] == found["opponents"]["builder"]["name"] == asked[0]["plans"][0]


SEARCHES = [{"sampler": "horovod"}, {"sampler": "random"}, {"baselines": False}]


@pytest.mark.parametrize("search", sweep(SEARCHES, [{"baselines": False}]))
def test_every_sampler_has_the_same_opponents(search, tmp_path, monkeypatch):
    world = World()
    asked = with_session(monkeypatch, world, PricedSession(world.price))
    tuned = {**configuration(**search), "ddp": {"bucket_cap_mb": ["default", 1, 5, 100]}}
    outcome = tuning_run.TuningRun(TuningSettings.parse(tuned), tmp_path, ExitStack()).run()
    plans = {str(point[BUILDER]): world.space.plan(point) for point in world.space.baselines()}
    best = min(plans, key=lambda name: world.plan_price(plans[name]))
    assert (opponents := outcome.result.opponents).builder is not None
    assert opponents.builder.name == asked[0]["plans"][0] == best
    assert opponents.builder.seconds == pytest.approx(1.005 * world.plan_price(plans[best]))
    assert opponents.ddp is not None
    assert opponents.ddp.seconds == pytest.approx(1.005 * 0.4)
    assert len(asked[0]["rivals"]) == 3


@pytest.mark.parametrize(
    ("changed", "field"), [({"scheduling": "none"}, "scheduling"), ({"launch": {"kind": "emulated"}}, "launch")]
)
def test_times_of_another_job_are_not_gone_on_with(tmp_path, changed, field):
    world = World(tmp_path)
    study = world.trials().study
    world.job.claim(study)
    world.job.claim(study)
    other = replace(world.job, settings=TuningSettings.parse({**configuration(), **changed}))
    with pytest.raises(storages.StudyError, match=f"{field}: study '.*' was measured with"):
        other.claim(study)


def test_times_of_the_slowest_rank_are_not_gone_on_with(tmp_path):
    world = World(tmp_path)
    study = world.trials().study
    world.job.claim(study)
    facts = json.loads(study.user_attrs[JOB])
    assert facts.pop("steps")
    study.set_user_attr(JOB, json.dumps(facts))
    with pytest.raises(storages.StudyError, match=r"an earlier version measured it, .* choose another study.name"):
        world.job.claim(study)
