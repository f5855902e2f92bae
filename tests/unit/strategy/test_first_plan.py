"""What a job does whose first plan cannot be opened: one process, without engines."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from torch import nn

from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.errors import OpeningError
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning import job_tuning
from lightning_autosync.strategy.tuning.job_tuning import TRIAL_CONNECT_TIMEOUT, JobTuning
from lightning_autosync.strategy.tuning.settings import TuningSettings


@dataclass
class Found:
    """A resolution, as far as it is asked."""

    schedule: str
    plan: Any = None
    reason: str = "a test says so"
    fingerprint: str = "0"


class Buffers:
    """What an engine that fails has allocated."""


@pytest.mark.parametrize(("changes", "timeout"), [(0, CONNECT_TIMEOUT), (1, TRIAL_CONNECT_TIMEOUT)])
def test_the_engine_that_failed_is_gone_before_the_next_one_is_opened(
    monkeypatch: pytest.MonkeyPatch, changes: int, timeout: float
) -> None:
    tuning = object.__new__(JobTuning)
    tuning._resolution, tuning._changes, tuning._fell_back = Found("chosen"), changes, False  # type: ignore[assignment]
    monkeypatch.setattr(job_tuning, "fall_back", lambda found, error: Found("native", plan=found))
    monkeypatch.setattr(job_tuning, "rank_zero_info", lambda _: None)
    left: list[weakref.ref[Buffers]] = []
    tuning._resolution.plan = tuning._resolution

    def open_engine(schedule: str, seconds: float) -> Any:
        assert seconds == timeout
        if schedule == "chosen":
            buffers = Buffers()
            left.append(weakref.ref(buffers))
            raise OpeningError("rank 1: no memory")
        return schedule, left[0]()

    assert tuning._open_first(open_engine) == ("native", None)
    assert tuning._fell_back


def test_an_error_before_the_first_step_leaves_no_engine_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = JobTuning(nn.Linear(1, 1), StrategySettings(tuning=TuningSettings()), 1, 2, None, None)
    tuning._resolution, tuning._preparation = mock.Mock(alternatives=[mock.Mock()]), mock.Mock()
    engine = mock.Mock()
    monkeypatch.setattr(job_tuning, "compile_plan", mock.Mock())
    monkeypatch.setattr(job_tuning.dist, "new_group", mock.Mock(return_value="group"))
    monkeypatch.setattr(job_tuning, "LiveTuner", mock.Mock(side_effect=MemoryError))
    destroyed = mock.Mock()
    monkeypatch.setattr(job_tuning.dist, "destroy_process_group", destroyed)
    with pytest.raises(MemoryError):
        tuning.start(mock.Mock(return_value=engine), mock.Mock(), mock.Mock())
    engine.close.assert_called_once_with()
    destroyed.assert_called_once_with("group")
