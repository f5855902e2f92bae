"""How far a reference is believed: as far as the trials beside it follow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lightning_autosync.search.drift import Footing, Sight

SECONDS = 0.1


def _sights(trials: Callable[[int], float], reference: Callable[[int], float], count: int = 80) -> list[Sight]:
    """Four trials a batch; plans differ by half, predictions of them by 3%."""
    draw = random.Random(7)
    made = []
    for number in range(count):
        batch, predicted = number - number % 4, SECONDS * draw.uniform(1.0, 1.5)
        seconds = predicted * trials(number) * draw.uniform(0.97, 1.03)
        made.append(Sight("run", number, batch, SECONDS * reference(batch), seconds, predicted))
    return made


def _slow_at_the_end(number: int) -> float:
    return 1.6 if number >= 60 else 1.0


def test_a_reference_that_is_slow_by_itself_corrects_nothing():
    footing = Footing.of(_sights(lambda _: 1.0, _slow_at_the_end), "run")
    assert footing.base.share < 0.1
    assert not footing.base.seen
    assert footing.bring("run", 70, 0.5) == 0.5


def test_a_machine_that_is_slow_for_all_is_corrected_wholly():
    footing = Footing.of(_sights(_slow_at_the_end, _slow_at_the_end), "run")
    assert footing.base.share == pytest.approx(1.0, abs=0.1)
    assert footing.bring("run", 72, 1.6) == pytest.approx(1.0, rel=0.06)


def test_what_others_have_half_of_is_corrected_by_half():
    footing = Footing.of(_sights(lambda number: _slow_at_the_end(number) ** 0.5, _slow_at_the_end), "run")
    assert footing.base.share == pytest.approx(0.5, abs=0.1)
    assert footing.base.spread == pytest.approx(1.6**0.5 - 1, abs=0.08)


def test_plans_that_were_predicted_badly_do_not_mislead():
    sights = _sights(lambda number: 3.0 if number % 5 == 0 else 1.0, _slow_at_the_end)
    assert Footing.of(sights, "run").base.share < 0.1


def test_a_slower_session_is_seen_though_neither_drifts_within():
    first = _sights(lambda _: 1.0, lambda _: 1.0, 40)
    second = [
        sight._replace(run="later", reference=0.2, seconds=2 * (sight.seconds or 0.0))
        for sight in _sights(lambda _: 1.0, lambda _: 1.0, 24)
    ]
    footing = Footing.of([*first, *second], "run")
    assert footing.bring("later", 3, 0.2) == pytest.approx(0.1, rel=0.05)


def test_few_trials_beside_a_small_deviation_are_no_evidence():
    sights = _sights(lambda number: 1.06 if number >= 4 else 1.0, lambda batch: 1.06 if batch else 1.0, 8)
    assert Footing.of(sights, "run").base.share < 0.5


def test_without_predictions_the_reference_is_believed():
    sights = [sight._replace(predicted=None) for sight in _sights(lambda _: 1.0, _slow_at_the_end)]
    assert Footing.of(sights, "run").base.share == 1.0


def test_without_a_reference_nothing_is_brought_anywhere():
    sights = [sight._replace(reference=None) for sight in _sights(lambda _: 1.0, _slow_at_the_end)]
    footing = Footing.of(sights, "run")
    assert footing.base.level is None
    assert footing.bring("run", 3, 0.5) == 0.5
