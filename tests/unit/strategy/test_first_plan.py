"""What a job does whose first plan cannot be opened: one process, without engines."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn
from tuned_plans import CLUSTER, tuned, workload

from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.errors import DocumentError, OpeningError
from lightning_autosync.replay import Constants
from lightning_autosync.search.memory import TuningCache
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning import job_tuning
from lightning_autosync.strategy.tuning.job_tuning import TRIAL_CONNECT_TIMEOUT, JobTuning
from lightning_autosync.strategy.tuning.preparation import Preparation, _of_entry
from lightning_autosync.strategy.tuning.proposals import JobLinks
from lightning_autosync.strategy.tuning.settings import TuningSettings, read_tuning


@dataclass
class Found:
    """A resolution, as far as it is asked."""

    schedule: str
    plan: Any = None
    reason: str = "a test says so"
    fingerprint: str = "0"


class Buffers:
    """What an engine that fails has allocated."""


def failing_job(monkeypatch: pytest.MonkeyPatch, changes: int = 0) -> Any:
    """A job whose plan "chosen" cannot be opened."""
    tuning = object.__new__(JobTuning)
    tuning._resolution, tuning._changes, tuning._fell_back = Found("chosen"), changes, False  # type: ignore[assignment]
    tuning._preparation = None
    monkeypatch.setattr(job_tuning, "fall_back", lambda found, error: Found("native", plan=found))
    monkeypatch.setattr(job_tuning, "rank_zero_info", lambda _: None)
    tuning._resolution.plan = tuning._resolution
    return tuning


def open_engine(schedule: str, *_: float) -> str:
    if schedule == "chosen":
        raise OpeningError("rank 1: the network is down")
    return schedule


@pytest.mark.parametrize(("changes", "timeout"), [(0, CONNECT_TIMEOUT), (1, TRIAL_CONNECT_TIMEOUT)])
def test_the_engine_that_failed_is_gone_before_the_next_one_is_opened(
    monkeypatch: pytest.MonkeyPatch, changes: int, timeout: float
) -> None:
    tuning, left = failing_job(monkeypatch, changes), list[weakref.ref[Buffers]]()

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


def test_a_job_whose_links_have_changed_may_open_its_first_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = failing_job(monkeypatch)
    assert tuning._open_first(open_engine) == "native"
    assert tuning._fell_back
    tuning._resolution = Found("other")
    assert tuning._open_first(open_engine) == "other"
    assert not tuning._fell_back


@pytest.mark.parametrize(("rank", "remembered"), [(0, True), (0, False), (1, True)])
def test_a_remembered_plan_that_cannot_be_opened_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, remembered: bool
) -> None:
    """Otherwise every later job of this key would begin with it, fail to open it, and search no other."""
    cache, entry = TuningCache(tmp_path / "plans"), tuned()
    cache.store(entry)
    tuning = failing_job(monkeypatch)
    tuning._group = None
    tuning._settings = SimpleNamespace(tuning=TuningSettings(cache=str(tmp_path / "plans")))
    links = JobLinks(CLUSTER, Constants())
    plan = entry.plan.fingerprint if remembered else None
    tuning._preparation = Preparation(links, workload(), entry.key, remembered=plan)
    monkeypatch.setattr(job_tuning.dist, "get_rank", lambda _: rank)
    assert tuning._open_first(open_engine) == "native"
    assert (cache.find(entry.key) is None) == (rank == 0 and remembered)


@pytest.mark.parametrize(
    ("described", "links"),
    [(True, "3 hosts, described"), (False, "3 hosts, links as known to an earlier job on 2026-03-01")],
)
def test_the_links_of_a_remembered_plan_are_not_called_measured(described: bool, links: str) -> None:
    """The earlier job may have measured them or not."""
    entry = tuned()
    assert _of_entry(entry, workload(), entry.key, described, Constants()).links.describe() == links


def test_a_wrong_name_of_a_setting_of_tuning_suggests_the_nearest_one() -> None:
    with pytest.raises(
        DocumentError, match=r"^tuning\.prob: not known; did you mean 'probe'\? allowed: probe, search, "
    ):
        read_tuning({"prob": 5})
