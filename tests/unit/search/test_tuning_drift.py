"""Times on one correction: DDP, builders, trials of several sessions and processes, each beside the same reference."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy
import optuna
import pytest
from priced_session import PricedSession
from tuning_world import DDP_SECONDS, World

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError, TuningError
from lightning_autosync.learned import Estimate
from lightning_autosync.measure.bench.settings import DDPSweep
from lightning_autosync.measure.drift import Drift
from lightning_autosync.plan import SyncPlan
from lightning_autosync.plan.space import BUILDER
from lightning_autosync.search.tuning.opponents import REFERENCE, MeasuredOpponent, builder_plans, settle_reference
from lightning_autosync.search.tuning.records import drift_of, ranked
from lightning_autosync.workload import Workload

MEAN_OF_RANKS = 1.005
NEARLY = 0.1
"""The session's times are a replay's of less detail, so trials share nearly all of the reference's deviations."""


def test_the_reference_is_measured_beside_every_trial_and_ranking_follows_it():
    world = World(budget=15, batch=1)
    trials = world.trials()
    world.tuner(trials).run()
    assert all(record.reference is not None for record in trials.records())
    assert not drift_of(trials.records()).seen
    slow = World(storage=world.storage, budget=20, batch=1)
    slow.factor = 2.0
    again = slow.trials()
    slow.tuner(again).run()
    drift = drift_of(again.records())
    assert drift.seen
    assert drift.spread == pytest.approx(1.0, abs=2 * NEARLY)
    assert drift.corrected(0, 1.0) == pytest.approx(2 * drift.corrected(19, 1.0), rel=NEARLY)


class Usual:
    """A replay that knows what plans take on a machine that is as fast as usual."""

    def __init__(self, world: World) -> None:
        self._world = world

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        return Estimate(numpy.array([self._world.plan_price(plan) for plan in plans]), numpy.zeros(len(plans)))


@pytest.mark.slow
def test_a_slower_machine_is_believed_though_the_sampler_learns_from_what_it_measures():
    search = {"sampler": "autosync", "batch": 4, "options": {"population": 16}}
    world = World(budget=24, **search)
    world.tuner(world.trials(), Usual(world)).run()
    slow = World(storage=world.storage, budget=72, **search)
    slow.factor = 1.6
    trials = slow.trials()
    slow.tuner(trials, Usual(slow)).run()
    assert drift_of(trials.records()).share > 0.8
    prices = {
        record.plan: seconds / slow.plan_price(trials.plan_of(record.number))
        for record, seconds in ranked(trials.records())
    }
    assert max(prices.values()) < 1.1 * min(prices.values())


@pytest.mark.slow
def test_ddp_and_builders_beside_the_study_are_corrected_for_drift_like_the_trials():
    world = World(budget=14)
    trials = world.trials()
    reference = world.reference(trials)
    opponents = world.opponents(trials, reference)
    opponents.measure(builder_plans(world.job))
    alone = opponents.fastest("builder", Drift({}))
    world.tuner(trials).run()
    slow = World(storage=world.storage, budget=40)
    slow.factor = 2.0
    trials = slow.trials()
    slow.tuner(trials).run()
    drift = drift_of(trials.records())
    assert opponents.fastest("ddp", drift)[0].seconds == pytest.approx(2 * DDP_SECONDS * MEAN_OF_RANKS, rel=NEARLY)
    builders = {one.name: one.seconds for one in opponents.fastest("builder", drift)}
    as_trials = {record.builder: seconds for record, seconds in ranked(trials.records()) if record.builder}
    assert alone[0].name in as_trials
    for name, seconds in as_trials.items():
        assert builders.get(name, seconds) == pytest.approx(seconds, rel=NEARLY)
    plans = {str(point[BUILDER]): world.space.plan(point) for point in world.space.baselines()}
    assert alone[0].name == min(plans, key=lambda name: world.plan_price(plans[name]))


def test_without_drift_opponents_are_as_they_were_measured():
    world = World(budget=13)
    trials = world.trials()
    world.tuner(trials).run()
    opponents = world.opponents(trials, world.reference(trials))
    found = opponents.fastest("ddp", drift_of(trials.records()))
    assert [(one.name, one.seconds) for one in found] == [("ddp", pytest.approx(DDP_SECONDS * MEAN_OF_RANKS))]


def test_a_run_that_goes_on_measures_no_opponent_again(tmp_path):
    first = World(tmp_path, budget=13)
    first.tuner(first.trials()).run()
    again = World(tmp_path, budget=14)
    again.factor = 9.0
    trials = again.trials()
    opponents = again.opponents(trials, again.reference(trials))
    opponents.measure({})
    assert "ddp" not in {name for name, _ in again.session.turns}
    assert opponents.fastest("ddp", Drift({}))[0].seconds == pytest.approx(DDP_SECONDS * MEAN_OF_RANKS)


def test_a_setting_of_ddp_that_was_given_up_beside_others_is_measured_when_it_is_alone(tmp_path):
    world = World(tmp_path)
    trials = world.trials()
    first = world.opponents(trials, world.reference(trials))
    first._standings = [
        MeasuredOpponent("ddp", "ddp_view", 0, "complete", 0.1, None),
        MeasuredOpponent("ddp", "ddp", 0, "pruned", 0.9, "its fastest step takes 9 times the best"),
    ]
    first.measure({})
    assert "ddp" in {name for name, _ in world.session.turns}
    assert [one.name for one in first.fastest("ddp", Drift({}))] == ["ddp"]


def test_measuring_opponents_says_what_is_measured_and_how_far_it_is(caplog):
    caplog.set_level("INFO")
    world = World()
    world.job = replace(world.job, settings=world.settings.model_copy(update={"ddp": DDPSweep(bucket_cap_mb=(1, 2))}))
    builders = dict(islice(builder_plans(world.job).items(), 5))
    trials = world.trials()
    world.opponents(trials, world.reference(trials)).measure(builders)
    said = [record.message for record in caplog.records if record.name.endswith("opponents")]
    names = list(builders)
    assert [line for line in said if line.startswith("measuring")] == [
        "measuring settings of DDP, 1 to 2 of 2: ddp_1, ddp_2",
        f"measuring builders' plans, 1 to 3 of 5: {', '.join(names[:3])}",
        f"measuring builders' plans, 4 to 5 of 5: {', '.join(names[3:])}",
    ]
    assert {line.partition(":")[0] for line in said} >= {"ddp_1", "ddp_2", *names}
    assert "ddp_1: 402.0 ms a step" in said


def test_opponents_that_all_fail_say_why():
    world = World()
    world.session = PricedSession(lambda name, order: float("inf") if "ddp" in order else world.price(name, order))
    trials = world.trials()
    with pytest.raises(DocumentError, match="ddp: all failed; ddp: rank 1 died while ddp ran"):
        world.opponents(trials, world.reference(trials)).measure({})


def test_the_study_keeps_the_reference_for_all_sessions_whatever_they_would_choose():
    world = World()
    study = world.trials().study
    one, other = list(builder_plans(world.job).values())[:2]
    settle_reference(world.new_reference(), study, [one, other])
    kept = study.user_attrs[REFERENCE]
    measured: list[str] = []

    def note(name: str, order: Mapping[str, Any]) -> float:
        measured.append(SyncPlan.from_dict(order["plan"]).fingerprint)
        return 1.0

    again = world.new_reference(PricedSession(note))
    settle_reference(again, study, [other, one])
    assert again.measure() == pytest.approx(MEAN_OF_RANKS)
    assert set(measured) == {one.fingerprint}
    assert study.user_attrs[REFERENCE] == kept


def test_a_reference_that_another_process_has_replaced_does_not_count():
    world = World()
    trials = world.trials()
    one, other = list(builder_plans(world.job).values())[:2]
    reference = world.new_reference()
    settle_reference(reference, trials.study, [one])
    trials.study.set_user_attr(REFERENCE, json.dumps(other.to_dict()))  # by a process that saw none just before
    opponents = world.opponents(trials, reference)
    opponents.measure({})
    assert reference.plan == other
    assert opponents.to_dict()["reference_by_batch"] == {}
    opponents.measure({"other": other})
    (seconds,) = opponents.to_dict()["reference_by_batch"].values()
    assert seconds == pytest.approx(MEAN_OF_RANKS * world.plan_price(other))


def test_a_plan_that_does_not_run_is_no_reference():
    world = World()
    study = world.trials().study
    one, other = list(builder_plans(world.job).values())[:2]

    def breaks(name: str, order: Mapping[str, Any]) -> float:
        return float("inf") if SyncPlan.from_dict(order["plan"]).fingerprint == one.fingerprint else 1.0

    reference = world.new_reference(PricedSession(breaks))
    settle_reference(reference, study, [one])
    assert (reference.measure(), reference.measurement()) == (None, None)
    assert REFERENCE not in study.user_attrs
    settle_reference(reference, study, [one, other])
    assert reference.measure() == pytest.approx(MEAN_OF_RANKS)


def test_each_process_sees_the_drift_of_its_own_trials_and_ranks_all_by_it():
    storage = optuna.storages.InMemoryStorage()
    for number, (name, factor) in enumerate([("one", 1.0), ("two", 2.0)] * 3):
        world = World(storage=storage, batch=3, budget=3 * (number + 1))
        world.factor = factor
        trials = world.trials(run=name, alone=False)
        world.tuner(trials).run()
    records = trials.records()
    assert [record.run for record in records] == [*["one"] * 3, *["two"] * 3] * 3
    fastest = min(records[3:6], key=lambda record: record.seconds or math.inf)
    assert fastest.state == "complete"  # "one" is no measure for the first batch of "two"
    assert drift_of(records).seen
    for factor, name in ((1.0, "one"), (2.0, "two")):
        assert not drift_of(records, name).seen
        for record, seconds in ranked(records, name):
            price = world.plan_price(trials.plan_of(record.number))
            assert seconds == pytest.approx(factor * MEAN_OF_RANKS * price, rel=NEARLY)


def test_the_failures_of_another_process_do_not_end_this_one():
    storage = optuna.storages.InMemoryStorage()
    broken = World(storage=storage, batch=1, max_failures=3)
    broken.session = PricedSession(
        lambda name, order: float("inf") if name.startswith("trial") else broken.price(name, order)
    )
    with pytest.raises(TuningError, match="the last 3 trials failed"):
        broken.tuner(broken.trials(run="broken", alone=False)).run()
    sound = World(storage=storage, batch=1, max_failures=3, budget=6)
    sound.session = PricedSession(lambda name, order: float("inf") if name == "trial 3" else sound.price(name, order))
    trials = sound.trials(run="sound", alone=False)
    sound.tuner(trials).run()
    assert [record.state for record in trials.records()][:4] == ["failed"] * 4
    assert "failed" not in [record.state for record in trials.records()][4:]
