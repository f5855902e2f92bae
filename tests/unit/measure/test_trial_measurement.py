"""How long plans are measured, and what the drift of a machine does to what was measured."""

from __future__ import annotations

import math

import pytest
from priced_session import PricedSession

from lightning_autosync.measure.drift import Drift
from lightning_autosync.measure.interleaving import StoppingRule, TrialMeasurement, TrialSettings, measure_in_turns
from lightning_autosync.measure.session import Contender
from lightning_autosync.measure.step_time import relative_error

SETTINGS = TrialSettings(min_steps=4, max_steps=10, error=0.02, turn=0.1, prune_after=3, margin=0.1, max_slowdown=2.5)


def measured(*turns: list[float]) -> TrialMeasurement:
    made = TrialMeasurement(Contender("a", {}))
    for steps in turns:
        made.add([steps, [0.9 * step for step in steps]])
    return made


def decided(best: float | None, *turns: list[float]) -> str:
    made = measured(*turns)
    StoppingRule(SETTINGS, best).decide(made)
    return made.state


def test_earlier_names_of_settings_still_work_with_a_warning():
    with pytest.warns(FutureWarning, match="most: this key is now named max_steps"):
        assert TrialSettings.parse({"most": 7}).max_steps == 7


def test_a_measurement_counts_the_mean_of_ranks():
    found = measured([1.0, 3.0], [2.0])
    assert found.steps == [[1.0, 3.0, 2.0], pytest.approx([0.9, 2.7, 1.8])]
    assert found.seconds == pytest.approx(1.9)
    assert (found.count, found.turns) == (3, 2)


def test_the_error_of_a_median_by_hand():
    assert relative_error([5.0]) == math.inf
    assert relative_error([2.0, 2.0, 2.0]) == 0.0
    # Deviations from the median 10 are 1, 0, 1, 2: their median is 1.
    assert relative_error([9.0, 10.0, 11.0, 8.0, 10.0]) == pytest.approx(1.4826 * 1.2533 * 1.0 / math.sqrt(5) / 10)


def test_a_plan_is_done_when_its_median_is_known_or_its_steps_are_spent():
    steady, wild = [0.05] * 4, [0.05, 0.07, 0.09, 0.06]
    assert decided(None, [0.05], [0.05], [0.05]) == "running"
    assert decided(None, [0.05], [0.05], steady) == "complete"
    assert decided(None, [0.05], [0.05], wild) == "running"
    assert decided(None, [0.05], wild, [*wild, 0.08]) == "complete"


def test_a_loser_is_given_up_only_if_even_its_fastest_step_is_slower():
    assert decided(0.04, [0.05], [0.05], [0.05]) == "pruned"
    assert decided(0.04, [0.05], [0.041], [0.05]) == "running"


def test_short_steps_are_not_judged_by_one_turn_but_long_ones_are():
    assert decided(0.001, [0.05]) == "running"
    assert decided(0.001, [0.05], [0.05, 0.05]) == "running"
    assert decided(0.1, [0.3]) == "pruned"
    assert decided(0.13, [0.3]) == "running"


def test_turns_are_filled_but_never_exceed_what_is_left():
    rule = StoppingRule(SETTINGS)
    assert rule.turn(measured()) == 1
    assert rule.turn(measured([0.04])) == 3
    assert rule.turn(measured([0.001])) == 4
    assert rule.turn(measured([0.001] * 9)) == 1
    assert rule.turn(measured([7.0])) == 1


def test_plans_take_turns_in_alternating_order_until_each_is_decided():
    session = PricedSession(_price)
    measurements = [TrialMeasurement(Contender(name, {})) for name in ("a", "slow", "b", "awful")]
    measure_in_turns(session, measurements, StoppingRule(SETTINGS), warm_up=2)  # type: ignore[arg-type]
    assert [one.state for one in measurements] == ["complete", "pruned", "complete", "pruned"]
    names = [name for name, _ in session.turns]
    assert names[:3] == ["a", "a", "a"]  # two steps to warm up, one that counts
    second_round = [name for name in names[names.index("awful") :] if name != "awful"]
    assert second_round[:3] == ["b", "slow", "a"]
    assert sorted(session.taken_down) == ["a", "awful", "b", "slow"]
    assert all(one.elapsed >= 0 for one in measurements)


def test_a_measurement_apart_is_no_measure_for_others_and_others_are_none_for_it():
    session = PricedSession(_price)
    fast, slow = TrialMeasurement(Contender("a", {}), is_reference=True), TrialMeasurement(Contender("slow", {}))
    measure_in_turns(session, [fast, slow], StoppingRule(SETTINGS), warm_up=2)  # type: ignore[arg-type]
    assert [one.state for one in (fast, slow)] == ["complete", "complete"]
    fast, awful = TrialMeasurement(Contender("a", {})), TrialMeasurement(Contender("awful", {}), is_reference=True)
    measure_in_turns(session, [fast, awful], StoppingRule(SETTINGS), warm_up=2)  # type: ignore[arg-type]
    assert [one.state for one in (fast, awful)] == ["complete", "complete"]


def _price(name: str, order: object) -> float:
    return {"a": 0.05, "b": 0.05, "slow": 0.2, "awful": 9.0, "broken": math.inf}[name]


def test_a_plan_that_kills_a_worker_fails_alone_and_the_others_go_on_with_their_steps():
    session = PricedSession(_price)
    measurements = [TrialMeasurement(Contender(name, {})) for name in ("a", "broken", "b")]
    measure_in_turns(session, measurements, StoppingRule(SETTINGS), warm_up=1)  # type: ignore[arg-type]
    assert [one.state for one in measurements] == ["complete", "failed", "complete"]
    assert measurements[1].why == "rank 1 died while broken ran"
    assert session.restarts == 1
    # Of a: a warm-up step and a step, then, on new workers, both once more before its turns go on.
    assert [steps for name, steps in session.turns if name == "a"][:3] == [1, 1, 1]
    assert measurements[0].count >= SETTINGS.min_steps


def test_before_any_plan_is_done_only_multiples_of_what_was_seen_are_given_up():
    rule = StoppingRule(SETTINGS, reference=0.1)
    slower, hopeless = TrialMeasurement(Contender("slower", {})), TrialMeasurement(Contender("hopeless", {}))
    for _ in range(3):
        slower.add([[0.2, 0.2]])
        hopeless.add([[0.3]])
    rule.decide(hopeless)
    assert (hopeless.state, hopeless.why) == ("pruned", "its fastest step takes 3.00 times the reference's")
    rule.decide(slower)
    assert slower.state == "complete"
    assert rule.best == pytest.approx(0.2)
    assert rule.far_slower(0.51)
    assert not rule.far_slower(0.49)


def test_a_steady_machine_leaves_times_alone():
    drift = Drift({4: 1.0, 8: 1.02, 12: 0.99})
    assert not drift.seen
    assert drift.corrected(9, 5.0) == 5.0
    assert drift.expected(5.0) == 5.0
    assert drift.to_dict()["ranked_by"] == "seconds as measured"


def test_a_lone_slow_turn_is_no_drift():
    assert not Drift({number: 3.0 if number == 3 else 1.0 for number in range(8)}).seen


def test_times_on_a_slow_stretch_count_less():
    drift = Drift({number: 1.0 if number < 10 else 2.0 for number in range(21)})
    assert drift.seen
    assert drift.spread == pytest.approx(1.0)
    assert drift.level == 2.0
    assert drift.corrected(2, 5.0) == pytest.approx(10.0)
    assert drift.corrected(18, 10.0) == pytest.approx(10.0)
    assert drift.expected(10.0) == pytest.approx(10.0)


def test_another_stretch_is_brought_to_this_level_where_the_difference_counts():
    drift = Drift(dict.fromkeys(range(6), 1.0))
    assert drift.convert(Drift({0: 2.0}), 0, 5.0) == pytest.approx(2.5)
    assert drift.convert(Drift({0: 1.04}), 0, 5.0) == 5.0
    slowing = Drift({number: 2.0 if number < 10 else 4.0 for number in range(21)})
    assert drift.convert(slowing, 2, 5.0) == pytest.approx(2.5)
    assert drift.convert(slowing, 18, 10.0) == pytest.approx(2.5)
    assert drift.convert(Drift({}), 0, 5.0) == Drift({}).convert(drift, 0, 5.0) == 5.0


def test_without_a_reference_nothing_is_corrected():
    drift = Drift({})
    assert drift.level is None
    assert drift.corrected(3, 5.0) == 5.0
