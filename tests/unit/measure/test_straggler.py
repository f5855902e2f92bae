"""Stragglers on purpose: how long, whom, when, and the same each time."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from lightning_autosync.measure.models.straggler import Slowdown, Straggler, StragglerSettings


def delays(settings: StragglerSettings, rank: int, steps: int, compute: float = 1.0) -> list[float]:
    straggler = Straggler(settings, rank)
    return [straggler.delay(compute) for _ in range(steps)]


def test_a_factor_stretches_the_computation_of_its_ranks_in_its_time() -> None:
    settings = StragglerSettings(slowdowns=(Slowdown(ranks=(1, 3), factor=4.0, begin=2, end=4),))
    assert delays(settings, 1, 6, compute=0.5) == [0, 0, 1.5, 1.5, 0, 0]
    assert delays(settings, 0, 6) == [0] * 6


def test_slowdowns_combine() -> None:
    settings = StragglerSettings(slowdowns=(Slowdown(factor=2.0), Slowdown(ranks=(0,), factor=3.0, begin=1)))
    assert delays(settings, 0, 2) == [1.0, 5.0]


def test_pauses_have_their_rate_and_length_and_repeat_with_the_seed() -> None:
    settings = StragglerSettings(slowdowns=(Slowdown(pause_probability=0.1, pause=2.0),), seed=5)
    drawn = delays(settings, 2, 5000)
    pauses = [pause for pause in drawn if pause > 0]
    assert len(pauses) / len(drawn) == pytest.approx(0.1, rel=0.15)
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.15)
    assert delays(settings, 2, 5000) == drawn
    assert delays(settings, 3, 5000) != drawn
    assert delays(settings.model_copy(update={"seed": 6}), 2, 5000) != drawn


def test_it_sleeps_as_long_as_it_says() -> None:
    straggler = Straggler(StragglerSettings(slowdowns=(Slowdown(factor=3.0),)), rank=0)
    begin = time.monotonic()
    assert straggler(0.02) == pytest.approx(0.04)
    assert time.monotonic() - begin >= 0.04


def test_nobody_is_slow_by_default() -> None:
    slept: list[float] = []
    straggler = Straggler(StragglerSettings(), rank=0, sleep=slept.append)
    assert straggler(1.0) == 0.0
    assert slept == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pause": 1.0}, "pause and pause_probability: set both or neither"),
        ({"pause_probability": 0.5}, "pause and pause_probability: set both or neither"),
        ({"begin": 3, "end": 3}, "end: 3 must be above begin 3"),
        ({"factor": 0.5}, "factor"),
        ({"ranks": ()}, "ranks"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Slowdown(**fields)
