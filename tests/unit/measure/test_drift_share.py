"""How far a reference is believed: as far as the trials beside it follow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lightning_autosync.measure.drift import DriftCorrection, DriftObservation, run_with_turns

SECONDS = 0.1


def _measurements(
    trials: Callable[[int], float], reference: Callable[[int], float], count: int = 80
) -> list[DriftObservation]:
    """Four trials a batch; plans differ by half, and prices are off by 3%."""
    draw = random.Random(7)
    made = []
    for number in range(count):
        batch, price = number - number % 4, SECONDS * draw.uniform(1.0, 1.5)
        seconds = price * trials(number) * draw.uniform(0.97, 1.03)
        made.append(DriftObservation("run", number, batch, SECONDS * reference(batch), seconds, price))
    return made


def _slow_at_the_end(number: int) -> float:
    return 1.6 if number >= 60 else 1.0


def test_a_reference_that_is_slow_by_itself_corrects_nothing():
    drift = DriftCorrection.of(_measurements(lambda _: 1.0, _slow_at_the_end), "run")
    assert drift.base.share < 0.1
    assert not drift.base.seen
    assert drift.convert("run", 70, 0.5) == 0.5


def test_a_machine_that_is_slow_for_all_is_corrected_wholly():
    drift = DriftCorrection.of(_measurements(_slow_at_the_end, _slow_at_the_end), "run")
    assert drift.base.share == pytest.approx(1.0, abs=0.1)
    assert drift.convert("run", 72, 1.6) == pytest.approx(1.0, rel=0.06)


def test_a_machine_that_stays_slow_is_believed_from_its_fast_beginning():
    drift = DriftCorrection.of(_measurements(_slow_at_the_end, _slow_at_the_end, 200), "run")
    assert drift.base.share == pytest.approx(1.0, abs=0.1)
    assert drift.convert("run", 20, 1.0) == pytest.approx(1.6, rel=0.06)


def test_prices_of_builders_may_be_off_by_their_own():
    """They are 30% too low, and the reference was slower by itself beside the builders."""
    measurements = _measurements(lambda number: 1.3 if number < 12 else 1.0, lambda number: 1.1 if number < 12 else 1.0)
    assert DriftCorrection.of(measurements, "run").base.share > 0.5
    told = [each._replace(baseline=each.number < 12) for each in measurements]
    assert DriftCorrection.of(told, "run").base.share < 0.1


def test_what_others_have_half_of_is_corrected_by_half():
    drift = DriftCorrection.of(_measurements(lambda number: _slow_at_the_end(number) ** 0.5, _slow_at_the_end), "run")
    assert drift.base.share == pytest.approx(0.5, abs=0.1)
    assert drift.base.spread == pytest.approx(1.6**0.5 - 1, abs=0.08)


def test_plans_that_are_priced_badly_do_not_mislead():
    measurements = _measurements(lambda number: 3.0 if number % 5 == 0 else 1.0, _slow_at_the_end)
    assert DriftCorrection.of(measurements, "run").base.share < 0.1


def test_a_slower_session_is_seen_though_neither_drifts_within():
    first = _measurements(lambda _: 1.0, lambda _: 1.0, 40)
    second = [
        each._replace(run="later", reference=0.2, seconds=2 * (each.seconds or 0.0))
        for each in _measurements(lambda _: 1.0, lambda _: 1.0, 24)
    ]
    assert DriftCorrection.of([*first, *second], "run").convert("later", 3, 0.2) == pytest.approx(0.1, rel=0.05)


def test_few_trials_beside_a_small_deviation_are_no_evidence():
    measurements = _measurements(lambda number: 1.06 if number >= 4 else 1.0, lambda batch: 1.06 if batch else 1.0, 8)
    assert DriftCorrection.of(measurements, "run").base.share < 0.5


def test_without_prices_the_reference_is_believed():
    measurements = [each._replace(price=None) for each in _measurements(lambda _: 1.0, _slow_at_the_end)]
    assert DriftCorrection.of(measurements, "run").base.share == 1.0


def test_without_a_reference_nothing_is_brought_anywhere():
    measurements = [each._replace(reference=None) for each in _measurements(lambda _: 1.0, _slow_at_the_end)]
    drift = DriftCorrection.of(measurements, "run")
    assert drift.base.level is None
    assert drift.convert("run", 3, 0.5) == 0.5


def test_a_run_without_turns_gives_its_place_to_the_first_that_has_some():
    broken_off = DriftObservation("first", 0, None, None, None, None)
    measurements = [broken_off, *_measurements(lambda _: 1.0, lambda _: 1.0)]
    slower = [
        each._replace(run="slow", reference=2 * (each.reference or 0.0), seconds=2 * (each.seconds or 0.0))
        for each in measurements[1:]
    ]
    everyone = [*measurements, *slower]
    assert run_with_turns(everyone, "first") == run_with_turns(everyone, "run") == "run"
    assert run_with_turns(everyone, "slow") == "slow"
    assert run_with_turns([broken_off], "first") == "first"
    assert DriftCorrection.of(everyone, "first").convert("slow", 3, 2.0) == 2.0
    assert DriftCorrection.of(everyone, run_with_turns(everyone, "first")).convert("slow", 3, 2.0) == pytest.approx(
        1.0, rel=0.06
    )
