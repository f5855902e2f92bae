"""What a job remembers and tells of its trials: the times of plans, compared within each trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lightning_autosync.strategy.tuning import live
from lightning_autosync.strategy.tuning.live import LiveTuner
from lightning_autosync.strategy.tuning.tuner import Trial


def evidence(trials: list[Trial], present: int) -> dict[str, float]:
    return {name: seconds for name, (seconds, _) in steps(trials, present).items()}


def steps(trials: list[Trial], present: int) -> dict[str, tuple[float, int]]:
    """Seconds and number of steps by plan."""
    plans = [SimpleNamespace(name=name, plan=SimpleNamespace(fingerprint=name)) for name in ("a", "b", "c")]
    tuner: Any = SimpleNamespace(trials=trials, present=present, usual_seconds=0.5)
    evidence: Any = LiveTuner.evidence
    own, others = evidence.fget(SimpleNamespace(_tuner=tuner, _alternatives=plans))
    return {each.name: (each.seconds, each.steps) for each in (own, *others)}


def test_times_are_compared_within_trials_although_the_machine_becomes_slower() -> None:
    trials = [
        Trial(candidate=1, against=0, accepted=True, seconds=(0.4, 0.2), passes=(8, 8)),
        Trial(candidate=2, against=1, accepted=False, seconds=(0.6, 0.9), passes=(8, 8)),
    ]
    found = evidence(trials, present=1)
    assert list(found) == ["b", "a", "c"]
    assert found == pytest.approx({"b": 0.6, "a": 1.2, "c": 0.9})


def test_a_plan_without_counted_passes_in_a_trial_keeps_its_earlier_time() -> None:
    given_up = Trial(candidate=2, against=0, accepted=False, seconds=(0.4, 0.8), passes=(0, 2))
    assert steps([given_up], present=0) == {"a": (0.5, 1), "c": (1.0, 2)}
    counted = Trial(candidate=1, against=0, accepted=False, seconds=(0.25, 1.0), passes=(8, 7))
    assert steps([counted, given_up], present=0) == {"a": (0.25, 8), "b": (1.0, 7), "c": (0.5, 2)}


def test_a_job_without_trials_knows_the_time_of_its_plan() -> None:
    assert evidence([], present=0) == {"a": 0.5}


@pytest.mark.parametrize(
    ("accepted", "ended", "told"),
    [
        ([], False, ["no trial was completed, and a (plan a) was kept"]),
        (
            [False],
            False,
            ["tried 1 other plan in 16 steps, and kept a (plan a); the fastest other was b (plan b), 2.00x as fast"],
        ),
        ([True], False, ["tried 1 other plan in 16 steps; b (plan b) makes steps 2.00x as fast as a (plan a)"]),
        ([True], True, []),
    ],
)
def test_a_job_that_ends_before_its_trials_tells_what_they_have_found(
    monkeypatch: pytest.MonkeyPatch, accepted: list[bool], ended: bool, told: list[str]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(live, "rank_zero_info", lines.append)
    plans = [SimpleNamespace(name=name, plan=SimpleNamespace(fingerprint=name)) for name in ("a", "b")]
    trials = [Trial(candidate=1, against=0, accepted=each, seconds=(0.4, 0.2), passes=(8, 8)) for each in accepted]
    tuner: Any = object.__new__(LiveTuner)
    tuner._tuner = SimpleNamespace(trials=trials, present=int(any(accepted)), finished="")
    tuner._alternatives, tuner._ended, tuner._prices, tuner._used = plans, ended, None, 0
    tuner._engines, tuner._times, tuner._opening = {}, MagicMock(), MagicMock()
    tuner.close()
    stopped = "AutoSync: these trials stopped before their end: "
    assert lines == [stopped + each for each in told]
    assert tuner._opening.close.called
