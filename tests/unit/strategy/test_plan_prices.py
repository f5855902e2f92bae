"""Plans are predicted anew with the computation that the first steps of a job have shown."""

from __future__ import annotations

import math
import re
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.tracing import Arrival, Recorder, StepTrace
from lightning_autosync.errors import PredictorError
from lightning_autosync.plan import Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.plan.builders.default import NATIVE, SEARCHED, native_name
from lightning_autosync.replay import Constants, Replay, overlapped_step_time
from lightning_autosync.strategy.tuning import proposals
from lightning_autosync.strategy.tuning.predictor import PREDICTOR, Predictor
from lightning_autosync.strategy.tuning.prices import PlanPrices, computing_cores, timed_workload
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.strategy.tuning.tuner import Candidate, Tuner
from lightning_autosync.workload import Variable, Workload

PAIR = ClusterSpec.uniform(2, bandwidth="100 Mbit/s", name="pair")
# 4 kB, 8 kB, 12 kB; backward makes the last gradient first.
WORKLOAD = Workload(
    name="three",
    variables=tuple(Variable(name=name, shape=(size,)) for name, size in [("a", 1000), ("b", 2000), ("c", 3000)]),
)

WORKLOAD_OF_80_MIB = Workload(
    name="ten", variables=tuple(Variable(name=f"v{number}", shape=(2**20,)) for number in range(20))
)


def schedule_of(workload: Workload = WORKLOAD, **sizes: int) -> Schedule:
    return compile_plan(builders.all_reduce(workload, PAIR, **sizes), workload, PAIR)


def trace(forward: float, arrivals: Sequence[Arrival], backward: float) -> StepTrace:
    return StepTrace(forward, backward, backward + 0.1, backward + 0.1, (), (), (), arrivals=tuple(arrivals))


def ready_of(workload: Workload) -> dict[str, float | None]:
    return {variable.name: variable.ready for variable in workload.variables}


def test_gradients_are_ready_when_they_arrived() -> None:
    schedule = schedule_of(first_bucket_bytes=12_000, bucket_bytes=12_000)  # c | b, a
    assert [message.variables for message in schedule.messages] == [("c",), ("b", "a")]
    timed = timed_workload(WORKLOAD, schedule, [trace(1.0, [(0, 0, 1.2), (1, 1, 1.3), (1, 0, 1.5)], 1.6)] * 3, 1.6)
    assert timed.forward_time == pytest.approx(1.0)
    assert timed.backward_time == pytest.approx(0.6)
    assert ready_of(timed) == pytest.approx({"c": 0.2, "a": 0.3, "b": 0.5})
    assert timed.ready_order == ("c", "a", "b")


def test_medians_of_steps_count_and_the_slowest_rank_scales_them() -> None:
    traces = [trace(1.0, [(0, 0, 1.5)], 2.0), trace(1.0, [(0, 0, 1.6)], 2.0), trace(9.0, [(0, 0, 9.9)], 10.0)]
    timed = timed_workload(WORKLOAD, schedule_of(), traces, slowest=4.0)
    assert (timed.forward_time, timed.backward_time) == pytest.approx((2.0, 2.0))
    assert timed.variable("c").ready == pytest.approx(1.2)


def test_gradients_without_a_time_and_steps_without_computation_are_no_error() -> None:
    timed = timed_workload(WORKLOAD, schedule_of(), [trace(1.0, [(0, 1, 1.2)], 1.6)], slowest=1.6)
    assert ready_of(timed) == pytest.approx({"b": 0.2, "c": 0.6, "a": 0.6})
    assert timed_workload(WORKLOAD, schedule_of(), [trace(0.0, [(0, 0, 0.0)], 0.0)], slowest=0.0) == WORKLOAD


def test_steps_without_times_of_gradients_are_refused() -> None:
    """Else all gradients would seem to come at the end, and no message could overlap with the backward pass."""
    with pytest.raises(PredictorError, match="no times of gradients; expected a recorder with times_gradients=True"):
        timed_workload(WORKLOAD, schedule_of(), [trace(1.0, [], 1.6)] * 2, slowest=1.6)


def test_times_never_exceed_the_backward_pass() -> None:
    timed = timed_workload(WORKLOAD, schedule_of(), [trace(1.0, [(0, 0, 1.9), (0, 1, 1.2)], 1.6)], slowest=1.6)
    assert ready_of(timed) == pytest.approx({"c": 0.6, "b": 0.2, "a": 0.6})


def test_the_size_of_buckets_that_suits_the_computation_is_predicted_to_be_the_fastest() -> None:
    large = Workload(name="even", variables=tuple(Variable(name=f"w{n}", shape=(62_500,)) for n in range(16)))
    sizes = (250_000, 10**9)
    plans = [builders.all_reduce(large, PAIR, first_bucket_bytes=size, bucket_bytes=size) for size in sizes]
    without = [Replay(large, PAIR).predict(compile_plan(plan, large, PAIR)).step_time for plan in plans]
    # Backward takes as long as the transfer: small messages hide most of it.
    found = prices_of(large, plans, trace(0.01, [(n, 0, 0.01 + 0.02 * (n + 1)) for n in range(16)], 0.33))
    assert without[0] == pytest.approx(without[1], rel=0.01)
    assert found[0] < 0.7 * found[1]


def new_prices(
    workload: Workload,
    plans: list[SyncPlan],
    predictor: Any = PREDICTOR,
    cluster: ClusterSpec = PAIR,
    limit: float = 60.0,
) -> PlanPrices:
    schedule = compile_plan(plans[0], workload, PAIR)
    return PlanPrices(workload, cluster, Constants(), plans, schedule, limit, predictor=predictor)


def prices_of(workload: Workload, plans: list[SyncPlan], measured: StepTrace, *rest: Any) -> list[float]:
    prices = new_prices(workload, plans, *rest)
    assert prices.wait() is None
    prices.start([measured], measured.backward)
    found = prices.wait(240.0)
    assert found is not None
    return list(found)


def test_prices_with_overlap_are_those_of_steps_that_overlap() -> None:
    plans = [builders.byteps(WORKLOAD, PAIR, bucket_bytes=4000), builders.all_reduce(WORKLOAD, PAIR)]
    schedules = [compile_plan(plan, WORKLOAD, PAIR) for plan in plans]
    measured = trace(0.001, [(0, 0, 0.0015), (1, 0, 0.002), (2, 0, 0.003)], 0.003)
    every = [*plans, *(plan.model_copy(update={"waits": True}) for plan in plans)]
    prices = PlanPrices(WORKLOAD, PAIR, Constants(), every, schedules[0], 60.0, overlaps=True)
    prices.start([measured], measured.backward)
    timed = timed_workload(WORKLOAD, schedules[0], [measured], measured.backward)
    replay = Replay(timed, PAIR)
    expected = [overlapped_step_time(schedule, timed, replay) for schedule in schedules]
    waiting = [replay.predict(schedule).step_time for schedule in schedules]
    assert prices.wait(60.0) == pytest.approx([*expected, *waiting])
    assert all(one < other for one, other in zip(expected, waiting, strict=True))


ONE = [builders.all_reduce(WORKLOAD, PAIR)]


def test_a_prediction_that_fails_is_told_and_gives_none() -> None:
    with pytest.warns(UserWarning, match="new ones failed: PredictorError: ClusterError: "):
        assert prices_of(WORKLOAD, ONE, trace(1.0, [(0, 0, 1.5)], 2.0), PREDICTOR, ClusterSpec.uniform(2)) == []


def test_a_prediction_that_is_no_number_is_told_and_gives_none() -> None:
    broken = SimpleNamespace(predict=lambda *_: [math.nan])
    with pytest.warns(UserWarning, match="new ones failed: PredictorError: predicted seconds are"):
        assert prices_of(WORKLOAD, ONE, trace(1.0, [(0, 0, 1.5)], 2.0), broken) == []


def test_predictions_end_when_they_take_too_long_and_that_is_told() -> None:
    told = "new ones failed: PredictorError: they took more CPU time than tuning.search allows (0 s)"
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert prices_of(WORKLOAD, ONE * 1000, trace(1.0, [(0, 0, 1.5)], 2.0), PREDICTOR, PAIR, 0.0) == []


def test_predictions_that_are_stopped_end_their_process_and_say_nothing() -> None:
    own = Predictor()
    prices = new_prices(WORKLOAD, ONE * 3000, own, PAIR, 600.0)
    prices.start([trace(1.0, [(0, 0, 1.5)], 2.0)], 2.0)
    assert prices.wait(0.2) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prices.stop()
        assert prices.wait(10.0) == []
    assert own._process is not None
    assert own._process.poll() is not None


@pytest.mark.parametrize("plans", [0, 3])
def test_a_job_that_tries_no_plans_has_the_first_one_alone(plans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "_first_rank_result", lambda search, *_: search())
    tuning = TuningSettings(search=60.0, plans=plans)  # it ends early
    settings: Any = SimpleNamespace(tuning=tuning, bucket_bytes=None, semantics="exact", overlap=None, timeout=1.0)
    found, _ = proposals.propose(WORKLOAD, proposals.JobLinks(PAIR, Constants()), settings, None)
    assert found is not None
    assert (len(found.plans) == 1) == (plans == 0)
    assert all(each.balanced for each in found.plans)


@pytest.mark.parametrize(
    ("semantics", "proposed"),
    [("exact", {"exact"}), ("compressed", {"exact", "compressed"}), ("relaxed", {"exact", "compressed"})],
)
def test_plans_are_no_less_exact_than_the_user_allows_and_never_relaxed(
    semantics: str, proposed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposals, "_first_rank_result", lambda search, *_: search())
    tuning = TuningSettings(search=60.0, plans=6)  # it ends early
    settings: Any = SimpleNamespace(tuning=tuning, bucket_bytes=None, semantics=semantics, overlap=None, timeout=1.0)
    found, _ = proposals.propose(WORKLOAD_OF_80_MIB, proposals.JobLinks(PAIR, Constants()), settings, None)
    assert found is not None
    assert {each.plan.semantics for each in found.plans} == proposed


def test_a_job_that_may_overlap_also_has_the_plans_of_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "_first_rank_result", lambda search, *_: search())
    plans = {name: builders.build(name, WORKLOAD, PAIR).to_dict() for name in ("byteps", "ps", "all_reduce")}

    def search(*_: Any, overlaps: bool = False, balances: bool = True, **__: Any) -> list[dict[str, Any]]:
        assert balances == overlaps  # nothing reads what plans that wait take beside a computation
        best = "byteps" if overlaps else "ps"
        return [
            {"plan": plans[name], "seconds": 1.0 + (name != best), "origin": name, "balanced": 1.0, "busy": 0.0}
            for name in (best, "all_reduce")
        ]

    monkeypatch.setattr(PREDICTOR, "search", search)
    settings: Any = SimpleNamespace(
        tuning=TuningSettings(), bucket_bytes=None, semantics="exact", overlap="step", timeout=1.0
    )
    found, _ = proposals.propose(WORKLOAD, proposals.JobLinks(PAIR, Constants()), settings, None)
    assert found is not None
    assert [(each.name, each.plan.waits, each.native) for each in found.plans] == [
        ("byteps", False, False),
        ("all_reduce", False, False),
        ("ps, waiting", True, False),
        ("all_reduce, waiting", True, True),
    ]


def alternatives(prices: dict[str, tuple[float, float | None]]) -> list[proposals.Alternative]:
    """Plans by name with their predictions without and with an assumed computation."""
    plan = builders.build(NATIVE, WORKLOAD, PAIR)
    made = [proposals.Alternative(plan, name, one, balanced=other) for name, (one, other) in prices.items()]
    return proposals._marked(made)


@pytest.mark.parametrize(("later", "first"), [(1.009, "calm"), (1.011, "busy")])
@pytest.mark.parametrize("native", [4.0, 2.0 / 1.045])  # 2.0 is at most 5% longer
def test_of_plans_that_are_about_as_fast_a_job_begins_with_the_one_that_uses_least_of_the_cores(
    later: float, first: str, native: float
) -> None:
    plans = alternatives({"busy": (1.0, 2.0), "calm": (1.0, 2.0 * later), proposals.DDP: (2.0, native)})
    plans[:2] = [replace(plans[0], busy=0.9), replace(plans[1], busy=0.1)]
    found = proposals.order_plans(plans, proposals.JobLinks(PAIR, Constants()))
    assert found.plans[0].name == first


MIB_1 = native_name("1 MiB")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("searched", "ddp", "first", "reason"),
    [
        (0.97, 1.94, proposals.DDP, "DDP's fused native all-reduce"),
        (0.97, 1.96, MIB_1, "a native all-reduce in buckets of 1 MiB"),
        (0.97, None, proposals.DDP, "DDP's fused native all-reduce"),
        (0.9, 1.96, SEARCHED, "a plan found by search, predicted from "),
    ],
)
def test_a_job_begins_with_a_native_plan_if_no_other_is_much_faster(
    searched: float, ddp: float | None, first: str, reason: str, overlaps: bool
) -> None:
    """If no plan is predicted 5% faster than a native all-reduce, the job begins with one.

    Its buckets are those of DDP, unless others are predicted to be more than 5% faster beside a computation.
    """
    found = proposals.order_plans(
        alternatives(
            {
                SEARCHED: (searched, 1.8),
                NATIVE: (1.0, 1.9),
                MIB_1: (1.0, 1.86),
                proposals.DDP: (1.0, ddp),
            }
        ),
        proposals.JobLinks(PAIR, Constants()),
        overlaps,
    )
    assert found.plans[0].name == first
    assert found.reason.startswith(reason)
    assert [each.name for each in found.plans if each.native] == [proposals.DDP]


def test_a_plan_of_a_users_builder_is_no_native_one_whatever_its_name() -> None:
    ranked = alternatives({f"{NATIVE}_of_mine": (0.5, 0.9), NATIVE: (1.0, 1.9)})
    found = proposals.order_plans(ranked, proposals.JobLinks(PAIR, Constants()))
    assert found.reason.startswith(f"{NATIVE}_of_mine, predicted from ")


@pytest.mark.parametrize(("later", "first"), [(1.04, "late"), (1.06, SEARCHED), (None, SEARCHED)])
def test_a_job_begins_with_the_plan_that_suits_a_computation_among_those_that_are_about_as_fast(
    later: float | None, first: str
) -> None:
    prices = {SEARCHED: (1.0, 2.0), "late": (1.04 if later is None else later, later and 1.9)}
    ranked = alternatives({**prices, NATIVE: (1.4, 2.4)})
    assert proposals.order_plans(ranked, proposals.JobLinks(PAIR, Constants())).plans[0].name == first


@pytest.mark.parametrize(
    ("searched", "near", "native", "first"),
    [
        ((1.0, 2.0), (1.04, 1.9), (1.08, 2.4), "near"),  # some plan is more than 5% faster on the links
        ((1.0, None), (1.04, 1.9), (1.4, 2.4), SEARCHED),  # there was no time to compare the two
        ((1.0, 3.0), (1.2, 3.0), (1.06, 1.7), NATIVE),
        ((1.0, 1.78), (1.2, 3.0), (1.06, 1.7), SEARCHED),
    ],
)
def test_a_job_begins_with_a_faster_plan_unless_it_is_slower_beside_a_computation(
    searched: tuple[float, float | None],
    near: tuple[float, float | None],
    native: tuple[float, float | None],
    first: str,
) -> None:
    prices = sorted({SEARCHED: searched, "near": near, NATIVE: native}.items(), key=lambda item: item[1][0])
    found = proposals.order_plans(alternatives(dict(prices)), proposals.JobLinks(PAIR, Constants()))
    assert found.plans[0].name == first
    slower = (
        "a step is predicted to take 1.700 s, and 3.000 s with a plan found by search. The latter is predicted from"
        in found.reason
    )
    assert slower == (first == NATIVE)


def test_a_job_begins_with_large_messages_where_shared_cores_are_the_limit() -> None:
    """Predictions leave out the computation, which takes these cores from messages."""
    links = proposals.JobLinks(ClusterSpec.uniform(4, bandwidth="8 Gbit/s"), Constants(cores=2))
    ranked = proposals.search_plans(WORKLOAD_OF_80_MIB, links, TuningSettings(search=0.1))
    found = proposals.order_plans(ranked, links)
    assert found.plans[0].name == NATIVE
    assert len(found.plans[0].plan.groups) == 1
    assert "in large messages, because all ranks share the cores of one machine" in found.reason
    assert len(found.plans) == len(ranked)
    own_cores = replace(links, constants=Constants())
    assert "large messages" not in proposals.order_plans(ranked, own_cores).reason
    stated = proposals.search_plans(WORKLOAD_OF_80_MIB, links, TuningSettings(search=0.1), bucket_bytes=2**20)
    assert "large messages" not in proposals.order_plans(stated, links).reason


@pytest.mark.parametrize(("rate", "large"), [("8 Gbit/s", True), ("1 Gbit/s", False)])
@pytest.mark.parametrize("searched", [0.7, 0.9])
def test_a_much_faster_plan_comes_before_large_messages(searched: float, rate: str, large: bool) -> None:
    """How fast this host is does not move the threshold."""
    plan = builders.build(NATIVE, WORKLOAD, PAIR)
    prices = {SEARCHED: searched, NATIVE: 1.0, proposals.DDP: 1.0}
    ranked = proposals._marked([proposals.Alternative(plan, name, seconds) for name, seconds in prices.items()])
    links = proposals.JobLinks(ClusterSpec.uniform(4, bandwidth=rate), Constants(cores=2, host_cost=0.8e-9))
    first = proposals.order_plans(ranked, links).plans[0].name
    assert first == (NATIVE if large and searched > 0.8 else SEARCHED)


def test_the_reason_says_for_which_steps_plans_were_predicted() -> None:
    plan = builders.build(NATIVE, WORKLOAD, PAIR)
    ranked = proposals._marked([proposals.Alternative(plan, "byteps", 0.8), proposals.Alternative(plan, NATIVE, 1.0)])
    links = proposals.JobLinks(PAIR, Constants(), origin=proposals.DESCRIBED)
    assert (
        "synchronization alone, without computation, takes 800.0 ms, and 1.000 s with"
        in proposals.order_plans(ranked, links).reason
    )
    assert (
        "with overlap and a computation as long as the links need, a step takes 800.0 ms"
        in proposals.order_plans(ranked, links, overlaps=True).reason
    )


@pytest.mark.parametrize(("searched", "first"), [(0.78, "byteps"), (0.7, SEARCHED)])
def test_a_job_that_overlaps_begins_with_a_builders_plan_that_is_about_as_fast(searched: float, first: str) -> None:
    plan = builders.build(NATIVE, WORKLOAD, PAIR)
    prices = {SEARCHED: searched, "byteps": 0.8, NATIVE: 1.0}
    ranked = proposals._marked([proposals.Alternative(plan, name, seconds) for name, seconds in prices.items()])
    links = proposals.JobLinks(PAIR, Constants())
    assert proposals.order_plans(ranked, links, overlaps=True).plans[0].name == first
    assert proposals.order_plans(ranked, links).plans[0].name == SEARCHED


@pytest.mark.parametrize(("seconds", "overlapping"), [(0.99, NATIVE), (0.97, "byteps"), (0.94, "byteps")])
def test_with_overlap_a_smaller_gain_suffices_for_a_plan_on_trees(seconds: float, overlapping: str) -> None:
    plan = builders.build(NATIVE, WORKLOAD, PAIR)
    prices = {"byteps": seconds, NATIVE: 1.0}
    ranked = proposals._marked([proposals.Alternative(plan, name, each) for name, each in prices.items()])
    links = proposals.JobLinks(PAIR, Constants())
    assert proposals.order_plans(ranked, links, overlaps=True).plans[0].name == overlapping
    assert proposals.order_plans(ranked, links).plans[0].name == ("byteps" if seconds < 0.95 else NATIVE)


def test_times_that_come_late_count_for_the_passes_that_made_them() -> None:
    tuner = Tuner([Candidate("present", 1.0)], warm_up=1, passes=8, late=1)
    tuner.following()
    tuner.record(9.0)  # of no pass
    for seconds in (1.0, 2.0, 3.0):
        tuner.following()
        tuner.record(seconds)
    assert tuner.usual_seconds == 2.0


def drive(tuner: Tuner, seconds: list[float], passes: int) -> set[int]:
    used = set()
    for _ in range(passes):
        if tuner.opening is not None:
            tuner.opened()
        plan = tuner.following()
        used.add(plan)
        tuner.record(seconds[plan])
    return used


def test_nothing_is_tried_before_the_new_predictions_and_then_in_their_order() -> None:
    names = ("present", "slow", "fast", "faster")
    tuner = Tuner([Candidate(name, 1.0) for name in names], warm_up=1, passes=8, priced=False)
    assert drive(tuner, [1.0] * 4, 40) == {0}
    tuner.reprice([1.0, 1.2, 0.95, 0.9])
    drive(tuner, [1.0] * 4, 80)
    assert [trial.candidate for trial in tuner.trials] == [3, 2]  # 1 is predicted more than 10% slower


def test_without_new_predictions_the_earlier_ones_count() -> None:
    tuner = Tuner([Candidate("present", 1.0), Candidate("other", 0.9)], warm_up=1, passes=8, priced=False)
    tuner.reprice([])
    drive(tuner, [1.0, 0.9], 60)
    assert tuner.present == 1


def test_trials_end_at_their_maximum() -> None:
    tuner = Tuner([Candidate(str(n), 1.0) for n in range(9)], warm_up=1, passes=8, plans=3)
    drive(tuner, [1.0] * 9, 300)
    assert len(tuner.trials) == 3
    assert tuner.finished == "tuning.plans allows 3 trials"


def test_one_plan_that_fails_does_not_speak_against_all_of_its_kind() -> None:
    candidates = [Candidate("present", 1.0, native=True), *(Candidate(f"trees {n}", 0.85) for n in range(5))]
    tuner = Tuner(candidates, warm_up=1, passes=8)
    drive(tuner, [1.0, 5.0, *[0.85] * 4], 300)
    assert tuner.present == 2


@pytest.mark.parametrize(("seconds", "tried"), [(1.2, 2), (1.05, 5)])
def test_two_plans_of_a_kind_that_are_clearly_slower_speak_against_the_others(seconds: float, tried: int) -> None:
    candidates = [Candidate("present", 1.0, native=True), *(Candidate(f"trees {n}", 0.6) for n in range(5))]
    tuner = Tuner(candidates, warm_up=1, passes=8)
    drive(tuner, [1.0, *[seconds] * 5], 300)
    assert len(tuner.trials) == tried


def test_trials_correct_the_predictions_of_plans_of_their_kind_only() -> None:
    """Trees that prove much slower than predicted speak against other trees, and not against native plans."""
    candidates = [Candidate("present", 1.0, native=True)]
    candidates += [Candidate(f"trees {n}", 0.99) for n in range(4)] + [Candidate("native", 1.0, native=True)]
    tuner = Tuner(candidates, warm_up=1, passes=8)
    drive(tuner, [1.0, *[1.45] * 4, 0.9], 300)
    tried = [trial.candidate for trial in tuner.trials]
    assert 1 <= len([each for each in tried if each < 5]) <= 3
    assert 5 in tried
    assert tuner.present == 5
    assert not math.isnan(tuner.usual_seconds)


def native_and_trees(native: float, trees: float) -> Tuner:
    """A native plan is present; two of trees and one native plan may be tried."""
    others = [Candidate("trees", trees), Candidate("other trees", trees), Candidate("native", native, native=True)]
    return Tuner([Candidate("present", 1.0, native=True), *others], warm_up=1, passes=8)


@pytest.mark.parametrize(
    ("native", "trees", "first"), [(0.94, 0.93, 3), (0.97, 0.96, 3), (0.97, 0.75, 1), (1.05, 0.85, 1)]
)
def test_plans_like_the_present_one_come_first_unless_others_promise_clearly_more(
    native: float, trees: float, first: int
) -> None:
    """Trees take longer than predicted, relative to native plans. So near predictions speak for the native plan."""
    tuner = native_and_trees(native, trees)
    drive(tuner, [1.0] * 4, 60)
    assert tuner.trials[0].candidate == first


def test_the_order_of_trials_follows_what_trials_have_told() -> None:
    tuner = native_and_trees(native=0.98, trees=0.85)
    drive(tuner, [1.0, 1.09, 1.09, 0.98], 100)
    assert [trial.candidate for trial in tuner.trials] == [1, 3, 2]


def test_trials_tell_that_many_messages_take_longer_than_predicted() -> None:
    """Predictions and times are those of a job with real computation on four ranks that shared two cores."""
    predicted, measured = [0.0903, 0.1159, 0.0897, 0.1179], [0.1095, 0.1037, 0.1379, 0.0980]
    messages = [4, 2, 18, 1]
    candidates = [
        Candidate(str(count), seconds, always=count == 2, native=True, messages=count)
        for seconds, count in zip(predicted, messages, strict=True)
    ]
    tuner = Tuner(candidates, warm_up=1, passes=8)
    drive(tuner, measured, 200)
    assert [trial.candidate for trial in tuner.trials][:2] == [1, 3]
    assert tuner.present == 3


@pytest.mark.parametrize(
    ("present", "ddp", "tried"), [(0.5, 1.4, [2, 1]), (0.5, 1.6, [1]), (2.0, 2.9, [2, 1]), (2.0, 3.1, [1])]
)
def test_ddps_plan_is_not_tried_where_it_would_be_given_up_soon(present: float, ddp: float, tried: list[int]) -> None:
    """Its predicted time counts beside the time of the present plan, which is predicted to be half or twice as long."""
    candidates = [Candidate("present", 0.5), Candidate("trees", 0.49), Candidate("ddp", 0.5, True, True)]
    tuner = Tuner(candidates, warm_up=1, passes=8, priced=False)
    tuner.reprice([present, 0.98 * present, ddp])
    drive(tuner, [1.0, 1.0, 1.4], 100)
    assert [trial.candidate for trial in tuner.trials] == tried


@pytest.mark.parametrize(("ddp", "tried"), [(1.4, [1]), (1.6, [])])
def test_ddps_plan_is_not_tried_either_where_its_links_alone_would_take_so_long(ddp: float, tried: list[int]) -> None:
    """Without numba, formulas predict the time on the links, and nothing predicts plans again."""
    tuner = Tuner([Candidate("trees", 0.5), Candidate("ddp", ddp, True, True)], warm_up=1, passes=8, priced=False)
    tuner.reprice([])
    drive(tuner, [1.0, 2.0], 100)
    assert [trial.candidate for trial in tuner.trials] == tried


def test_the_first_known_time_of_each_present_plan_is_kept() -> None:
    tuner = Tuner([Candidate("present", 1.0), Candidate("other", 0.9)], warm_up=1, passes=8)
    drive(tuner, [1.0, 0.5], 6)
    assert tuner.earliest == {0: 1.0}
    drive(tuner, [2.0, 1.0], 60)
    assert tuner.present == 1
    assert tuner.earliest == {0: 1.0, 1: 1.0}


def test_ddps_plan_is_tried_against_that_of_an_earlier_job_which_took_longer() -> None:
    tuner = Tuner([Candidate("remembered", 2.0), Candidate("ddp", 2.0, True, True)], warm_up=1, passes=8)
    drive(tuner, [1.0, 0.9], 100)
    assert tuner.present == 1


def test_cores_that_computation_occupies_are_a_median_of_what_traces_know() -> None:
    def trace(computing: float | None) -> StepTrace:
        return StepTrace(1.0, 3.0, 4.0, 4.0, (), (), (), computing=computing)

    assert computing_cores([trace(None)]) is None
    assert computing_cores([trace(0.5), trace(None), trace(1.0), trace(1.2)]) == 0.5
    assert computing_cores([trace(2.5)]) == 1.0


def test_a_recorder_measures_the_cpu_time_of_the_thread_that_ran_the_backward_pass() -> None:
    recorder = Recorder(0)
    recorder.end_forward()
    time.sleep(0.05)
    recorder.end_backward()
    asleep = recorder.end()
    assert asleep.computing is not None
    assert asleep.computing < 0.5 * (asleep.backward - asleep.forward)

    recorder.begin()
    thread = threading.Thread(target=recorder.end_forward)
    thread.start()
    thread.join()
    recorder.end_backward()
    assert recorder.end().computing is None
