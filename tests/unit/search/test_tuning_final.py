"""The final comparison: one half of the rounds chooses, the other judges, and only a clear gain is claimed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from tuning_world import World, configuration, result_of

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import TuningError
from lightning_autosync.measure.bench.preparation import Preparation
from lightning_autosync.measure.bench.result import BenchResult, ContenderMeasurement
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.session import ContenderError
from lightning_autosync.measure.workers import InputError, WorkerError
from lightning_autosync.plan.builders import build
from lightning_autosync.replay import Constants
from lightning_autosync.search import population
from lightning_autosync.search.tuning import comparison, run
from lightning_autosync.search.tuning.comparison import FinalComparison, announcement, compare, judged
from lightning_autosync.search.tuning.job import TuningJob
from lightning_autosync.search.tuning.opponents import builder_plans
from lightning_autosync.search.tuning.result import Best, Opponent, OpponentRecords, Timing
from lightning_autosync.search.tuning.run import TuningRun, predicted_plan
from lightning_autosync.search.tuning.settings import TuningSettings

TIMES = {
    "ddp": ([3.0] * 5, [2.5] * 5),
    "ddp_view": ([2.9] * 5, [3.5, 3.5, 3.5, 3.6, 3.5]),
    "ps": ([1.2] * 5, [1.2] * 5),
    "lucky": ([1.0] * 5, [1.3, 1.1, 1.3, 1.3, 1.3]),
    "steady": ([1.1] * 5, [1.1] * 5),
}


def played(job: TuningJob, settings: BenchSettings, times: Mapping[str, Sequence[float]]) -> BenchResult:
    measurements = {
        name: ContenderMeasurement([[[one]] for one in of_name], None, None, 0.0) for name, of_name in times.items()
    }
    preparation = Preparation(job.cluster, job.workload, {}, dict.fromkeys(times, "exact"), {})
    return BenchResult(settings, preparation, None, {}, measurements)


def final_of(times: Mapping[str, tuple[list[float], list[float]]]) -> tuple[TuningJob, dict[str, Any]]:
    world = World()
    contenders = {name: {"plan": "x.yaml"} for name in times if not name.startswith("ddp")}
    rounds = len(times["ddp"][0])
    settings = BenchSettings.parse(
        {
            **{name: value for name, value in configuration().items() if name in ("model", "cluster")},
            "ddp": {"gradient_as_bucket_view": [False]},
            "contenders": {"ddp_view": {"ddp": {"gradient_as_bucket_view": True}}, **contenders},
            "rounds": 2 * rounds,
        }
    )
    result = played(world.job, settings, {name: [*chosen, *judged] for name, (chosen, judged) in times.items()})
    plan = build("all_reduce", world.job.workload, world.job.cluster)
    return world.job, judged(result, dict.fromkeys(contenders, plan), ("ddp", "ddp_view"))


def comparison_of(times: Mapping[str, tuple[list[float], list[float]]]) -> FinalComparison:
    return FinalComparison.read(final_of(times)[1], "here")


def best_of(number: int, final: dict[str, Any], builder: str | None = None) -> Best:
    seconds = FinalComparison.read(final, "here").seconds
    return Best(number=number, origin="evolved", seconds=seconds, plan={}, builder=builder)


def test_what_was_only_lucky_while_it_was_chosen_is_not_praised_for_that():
    final = comparison_of(TIMES)
    assert (final.winner, final.ddp) == ("lucky", "ddp_view")
    assert final.seconds == 1.3
    assert final.speedup("ps").median == pytest.approx(1.2 / 1.3)
    assert final.gains("ddp_view")
    assert not final.gains("ps")


def test_a_gain_is_claimed_only_where_the_whole_interval_is_above_one():
    close = {**TIMES, "lucky": ([1.0] * 5, [1.1, 1.25, 1.1, 1.25, 1.1])}
    final = comparison_of(close)
    assert final.speedup("ps").low < 1 < final.speedup("ps").median
    assert not final.gains("ps")
    for count in (1, 4):
        few = {name: (chosen[:count], judged[:count]) for name, (chosen, judged) in TIMES.items()}
        assert not comparison_of(few).gains("ddp_view")  # by chance all of a few rounds fall on one side


def test_the_builder_stays_unless_a_plan_beats_it_where_it_is_chosen():
    slower = {**TIMES, "lucky": ([1.21] * 5, [0.5] * 5), "steady": ([1.3] * 5, [0.5] * 5)}
    final = comparison_of(slower)
    assert final.winner == final.builder == "ps"


def test_of_several_builders_the_one_that_wins_where_it_is_chosen_is_the_best():
    world = World()
    times = {"ddp": [3.0] * 4, "ps": [1.2] * 4, "byteps": [1.1, 1.1, 1.4, 1.4], "trial_7": [1.15, 1.15, 1.0, 1.0]}
    contenders = {name: {"plan": "x.yaml"} for name in times if name != "ddp"}
    asked = {name: value for name, value in configuration().items() if name in ("model", "cluster")}
    settings = BenchSettings.parse({**asked, "contenders": contenders, "rounds": 4})
    plans = dict.fromkeys(contenders, build("ps", world.job.workload, world.job.cluster))
    data = judged(played(world.job, settings, times), plans, ["ddp"])
    final = FinalComparison.read(data, "here")
    assert final.winner == final.builder == "byteps"
    lines = list(result_of(world.job, best=best_of(3, data, "byteps"), final=data).lines())
    assert "no searched plan was faster than this builder's in the rounds that choose the winner" in lines
    assert not any("best builder" in line for line in lines)
    slower = played(world.job, settings, {**times, "byteps": [1.3] * 4})
    without = FinalComparison.read(judged(slower, plans, ["ddp"]), "here")
    assert (without.winner, without.builder) == ("trial_7", "ps")


@pytest.mark.parametrize(
    ("plans", "rounds", "said"),
    [
        (["ps"], 5, "1 plan (builder ps) with ddp, ddp_1: 5 rounds"),
        (
            ["ps", "trial_7", "predicted"],
            1,
            "3 plans (builder ps, trial_7, the plan found by prediction alone) with ddp, ddp_1: 1 round",
        ),
    ],
)
def test_the_announcement_names_plans_and_counts_rounds(plans, rounds, said):
    whole = f"comparing {said} to choose the winner, then as many to judge it"
    assert announcement(plans, ["ddp", "ddp_1"], rounds) == whole


def test_the_result_is_of_the_judging_rounds_and_keeps_those_that_chose():
    _, data = final_of(TIMES)
    assert data["settings"]["rounds"] == data["choosing"]["rounds"] == 5
    assert {name: one["round_seconds"] for name, one in data["contenders"].items()} == {
        name: judged for name, (_, judged) in TIMES.items()
    }
    assert data["choosing"]["round_seconds"] == {name: chosen for name, (chosen, _) in TIMES.items()}
    kinds = {name: one["kind"] for name, one in data["contenders"].items()}
    assert kinds == {"ddp": "ddp", "ddp_view": "ddp", "ps": "builder", "lucky": "plan", "steady": "finalist"}
    assert (data["winner"], data["best_ddp"]) == ("lucky", "ddp_view")
    assert data["opponents"] == {"ddp": "ddp_view", "builder": "ps"}
    assert data["speedup_over"]["ddp"]["median"] == pytest.approx(3.5 / 1.3)
    assert data["contenders"]["lucky"]["speedup_over_best_ddp"] == data["speedup_over"]["ddp"]
    assert data["gains"] == {"ddp": True, "builder": False}


def test_the_lines_claim_no_gain_that_was_not_shown():
    job, final = final_of(TIMES)
    opponents = OpponentRecords(ddp=Opponent(name="ddp", seconds=1.0))
    lines = list(result_of(job, opponents=opponents, best=best_of(7, final), final=final, timing=Timing()).lines())
    assert lines[0] == "best plan (trial 7, evolved): 1300.00 ms a step"
    assert lines[1].startswith("speedup over the best DDP, ddp_view: 2.69x [")
    assert lines[1].endswith("]")
    assert lines[2].startswith("speedup over the best builder, ps: 0.")
    assert lines[2].endswith("], not a gain")
    _, single = final_of({name: (chosen[:1], judged[:1]) for name, (chosen, judged) in TIMES.items()})
    lines = list(result_of(job, best=best_of(7, single), final=single).lines())
    assert lines[1].endswith("], too few rounds to be sure")


@pytest.mark.parametrize(
    ("storage", "shown"),
    [
        ("postgresql://me:secret@host:5432/trials", "postgresql://me:***@host:5432/trials"),
        ("postgresql://me:sec/ret@host/trials", "postgresql://me:***@host/trials"),
        ("mysql+pymysql://me:a:b@host/trials", "mysql+pymysql://me:***@host/trials"),
        (
            "postgresql://host/trials?user=me&password=secret&sslmode=require",
            "postgresql://host/trials?password=***&sslmode=require&user=me",
        ),
        ("postgresql+psycopg2://me@corp:secret@host/trials", "postgresql+psycopg2://me%40corp:***@host/trials"),
        ("postgresql://host/trials?sslpassword=secret", "postgresql://host/trials?sslpassword=***"),
        ("mysql+pymysql://host/trials?passwd=secret", "mysql+pymysql://host/trials?passwd=***"),
        ("postgresql://me:sec@ret@host/trials", "postgresql://me:***@host/trials"),
        ("mysql://host/trials?a=b&Password=secret", "mysql://host/trials?Password=***&a=b"),
        ("postgresql://me:secret@host:port/trials", "postgresql://me:***@host:port/trials"),
        ("sqlite:///runs/study.db", "sqlite:///runs/study.db"),
        ("runs/a:b@c/study.journal", "runs/a:b@c/study.journal"),
    ],
)
def test_a_result_does_not_tell_the_password_of_a_database(storage, shown, tmp_path):
    settings = TuningSettings.parse({**configuration(), "study": {"name": "s", "storage": storage}})
    world = World()
    trials = world.trials()
    opponents = world.opponents(trials, world.new_reference())
    data = TuningRun(settings, tmp_path, ExitStack())._result(trials, opponents, None).to_dict()
    assert data["study"] == {"name": "s", "storage": shown}
    assert "secret" not in json.dumps(data)


def test_a_sweep_may_compare_outcomes_by_their_seconds():
    job = World().job
    assert float(result_of(job, best=Best(origin="evolved", seconds=1.25, plan={}))) == 1.25
    with pytest.raises(ValueError, match="no trial completed"):
        float(result_of(job))


def test_several_settings_of_ddp_come_to_it_and_as_many_rounds_choose_as_judge(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    settings = TuningSettings.parse(
        {**configuration(), "rounds": 2, "ddp": {"bucket_cap_mb": [1, 5], "gradient_as_bucket_view": [False, True]}}
    )
    job = TuningJob.of(settings)
    seen: dict[str, Any] = {}

    def play(asked: BenchSettings, preparation: Preparation, session: Any) -> BenchResult:
        seen.update(rounds=asked.rounds, orders=list(preparation.orders), contenders=list(asked.all_contenders()))
        return played(job, asked, {name: [1.0] * asked.rounds for name in preparation.orders})

    monkeypatch.setattr(comparison, "play", play)
    plans = {"ps": build("ps", job.workload, job.cluster)}
    rivals = ["ddp_5_view", "ddp_1", "ddp_5"]
    found = compare(job, None, plans, rivals, tmp_path)
    assert announcement(["ps"], rivals, 2) in caplog.messages
    assert seen == {"rounds": 4, "orders": [*rivals, "ps"], "contenders": [*rivals, "ps"]}
    assert os.listdir(tmp_path / "finalists") == ["ps.yaml"]
    assert (found["choosing"]["rounds"], found["settings"]["rounds"]) == (2, 2)
    assert found["best_ddp"] in rivals


def test_a_last_comparison_that_fails_twice_is_no_success(tmp_path, monkeypatch):
    job = TuningJob.of(TuningSettings.parse({**configuration(), "rounds": 2}))
    count = iter(range(9))

    def play(*asked: Any) -> BenchResult:
        raise WorkerError(f"died in session {next(count)}", rank=1)

    monkeypatch.setattr(comparison, "play", play)
    rivals = [options.name for options in job.settings.ddp.options()]
    with pytest.raises(TuningError, match=r"the final comparison failed twice: .*session 1"):
        compare(job, None, {"ps": build("ps", job.workload, job.cluster)}, rivals, tmp_path)


def test_a_plan_that_fails_twice_is_left_out_of_the_last_comparison(tmp_path, monkeypatch):
    job = TuningJob.of(TuningSettings.parse({**configuration(), "rounds": 5}))
    asked = []

    def play(settings: BenchSettings, preparation: Preparation, session: Any) -> BenchResult:
        asked.append(list(preparation.orders))
        if "hanging" in preparation.orders:
            raise ContenderError("hanging", WorkerError("rank 1 died", rank=1))
        return played(job, settings, {name: [1.0] * settings.rounds for name in preparation.orders})

    monkeypatch.setattr(comparison, "play", play)
    plan = build("ps", job.workload, job.cluster)
    found = compare(job, None, {"ps": plan, "hanging": plan, "sound": plan}, ["ddp"], tmp_path)
    assert asked == [["ddp", "ps", "hanging", "sound"]] * 2 + [["ddp", "ps", "sound"]]
    assert set(found["contenders"]) == {"ddp", "ps", "sound"}
    assert found["left_out"] == {"hanging": "rank 1 died"}
    lines = list(result_of(job, best=best_of(7, found), final=found).lines())
    assert "hanging failed in this comparison and was left out: rank 1 died" in lines
    without = compare(job, None, {"hanging": plan, "sound": plan}, ["ddp"], tmp_path)
    assert (without["winner"], without["opponents"]["builder"]) == ("sound", None)


def test_a_last_comparison_of_which_every_plan_fails_is_no_success(tmp_path, monkeypatch):
    job = TuningJob.of(TuningSettings.parse({**configuration(), "rounds": 2}))

    def play(settings: BenchSettings, preparation: Preparation, session: Any) -> BenchResult:
        raise ContenderError(list(preparation.orders)[-1], WorkerError("rank 1 died", rank=1))

    monkeypatch.setattr(comparison, "play", play)
    plan = build("ps", job.workload, job.cluster)
    with pytest.raises(TuningError, match=r"failed with every plan; last error: contender 'ps': rank 1 died"):
        compare(job, None, {"ps": plan, "other": plan}, ["ddp"], tmp_path)


def test_a_plan_that_workers_refuse_is_left_out_at_once(tmp_path, monkeypatch):
    job = TuningJob.of(TuningSettings.parse({**configuration(), "rounds": 5}))

    def play(settings: BenchSettings, preparation: Preparation, session: Any) -> BenchResult:
        if "foreign" in preparation.orders:
            raise ContenderError("foreign", InputError("schedule: the model has no parameter 'x'", rank=0))
        return played(job, settings, {name: [1.0] * settings.rounds for name in preparation.orders})

    monkeypatch.setattr(comparison, "play", play)
    plan = build("ps", job.workload, job.cluster)
    found = compare(job, None, {"ps": plan, "foreign": plan}, ["ddp"], tmp_path)
    assert found["left_out"] == {"foreign": "schedule: the model has no parameter 'x'"}


def test_a_rival_that_fails_twice_ends_the_last_comparison(tmp_path, monkeypatch):
    job = TuningJob.of(TuningSettings.parse({**configuration(), "rounds": 2}))

    def play(*asked: Any) -> BenchResult:
        raise ContenderError("ddp", WorkerError("rank 1 died", rank=1))

    monkeypatch.setattr(comparison, "play", play)
    plan = build("ps", job.workload, job.cluster)
    with pytest.raises(TuningError, match="the final comparison failed twice: contender 'ddp': rank 1 died"):
        compare(job, None, {"ps": plan, "other": plan}, ["ddp"], tmp_path)


def test_the_plan_found_by_prediction_alone_is_compared_and_may_win():
    times = {**TIMES, "predicted": ([1.5] * 5, [1.5] * 5)}
    _, data = final_of(times)
    lines = list(result_of(World().job, best=best_of(7, data), final=data).lines())
    assert "speedup over the plan found by prediction alone: 1.15x [1.15, 1.36]" in lines
    _, data = final_of({**TIMES, "predicted": ([0.5] * 5, [0.5] * 5)})
    assert FinalComparison.read(data, "here").winner == "predicted"
    best = Best(origin="predicted", seconds=0.5, plan={})
    lines = list(result_of(World().job, best=best, final=data).lines())
    assert lines[0] == "best plan (found by prediction alone): 500.00 ms a step"
    assert not any("speedup over the plan" in line for line in lines)


def test_a_search_by_prediction_alone_needs_rates_and_time(monkeypatch):
    monkeypatch.setattr(population, "FRAMES_LIMIT", 0)  # it ends by itself, sooner
    world = World()
    found = predicted_plan(world.job, Constants(), seconds=60.0)
    assert found is not None
    assert world.plan_price(found) <= 1.01 * min(map(world.plan_price, builder_plans(world.job).values()))
    assert predicted_plan(world.job, Constants(), seconds=0) is None
    unknown = replace(world.job, cluster=ClusterSpec.uniform(nodes=4, devices=1, name="unknown"))
    assert predicted_plan(unknown, Constants(), seconds=1.0) is None


def test_a_search_by_prediction_that_fails_costs_no_comparison(monkeypatch, caplog):
    monkeypatch.setattr(run, "rank_plans", Mock(side_effect=RuntimeError("no plan fits")))
    assert predicted_plan(World().job, Constants(), seconds=1.0) is None
    assert "the search by prediction alone failed, so its plan is not compared: no plan fits" in caplog.text


@pytest.mark.parametrize("builder", [None, "ps"])
def test_the_predicted_plan_joins_others_and_does_not_stand_for_them(monkeypatch, caplog, tmp_path, builder):
    job = World().job
    predicted = build("ps", job.workload, job.cluster)
    monkeypatch.setattr(run, "predicted_plan", lambda *_: predicted)
    monkeypatch.setattr(run, "compare", lambda _job, _session, plans, *_: plans)
    caplog.set_level("INFO")
    tuning = Mock(_job=job, _directory=tmp_path, _settings=Mock(finalists=3))
    tuning._best_builder.return_value = None if builder is None else Opponent(name=builder, seconds=1.0)
    trials, opponents = Mock(own=None, records=list), Mock(fastest=lambda *_: [])
    if builder is None:
        with pytest.raises(TuningError, match="none of 0 trials completed"):
            TuningRun._compare(tuning, None, trials, opponents)
    else:
        assert list(TuningRun._compare(tuning, None, trials, opponents)) == ["ps"]
        assert "ps is also the plan found by prediction alone" in caplog.text
