"""What a job does whose first plan cannot be opened: one process, without engines."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn
from tuned_plans import CLUSTER, tuned, workload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine.connections import CONNECT_TIMEOUT
from lightning_autosync.errors import DocumentError, OpeningError, PlanError
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.plan.builders.default import NATIVE
from lightning_autosync.replay import Constants
from lightning_autosync.search.memory import Evidence, StepTime, TuningCache
from lightning_autosync.strategy.resolution import Resolution
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning import job_tuning, preparation, proposals
from lightning_autosync.strategy.tuning.job_tuning import TRIAL_CONNECT_TIMEOUT, JobTuning
from lightning_autosync.strategy.tuning.live import Alternative, _candidate
from lightning_autosync.strategy.tuning.preparation import Preparation, _of_entry
from lightning_autosync.strategy.tuning.proposals import JobLinks, Proposals, search_plans
from lightning_autosync.strategy.tuning.settings import TuningSettings, read_tuning
from lightning_autosync.strategy.tuning.tuner import Tuner
from lightning_autosync.workload import describe


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
    tuning._resolution = Resolution(*[mock.Mock()] * 4, reason="", alternatives=[mock.Mock()])
    tuning._preparation = mock.Mock()
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


@pytest.mark.parametrize("fails", ["search", "first engine"])
def test_the_group_for_trials_is_made_while_rank_0_searches_and_no_error_leaves_it(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    tuning = JobTuning(nn.Linear(1, 1), StrategySettings(tuning=TuningSettings()), 2, 1, None, None)
    searching = threading.Event()

    def search() -> dict[str, Any]:
        return {"made": searching.wait(60.0)}

    def make_group(*_: Any, **__: Any) -> str:
        searching.set()
        return "group"

    def prepare(*_: Any, meanwhile: Callable[[], None]) -> None:
        assert proposals._first_rank_result(search, 60.0, None, meanwhile) == {"made": True}
        raise PlanError("models differ")

    monkeypatch.setattr(job_tuning, "agree", mock.Mock())
    monkeypatch.setattr(job_tuning, "gather_json", lambda own, group: [own])
    monkeypatch.setattr(job_tuning.dist, "new_group", make_group)
    monkeypatch.setattr(job_tuning.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(proposals, "broadcast_json", lambda own, group: own)
    monkeypatch.setattr(job_tuning, "prepare", prepare)
    destroyed = mock.Mock()
    monkeypatch.setattr(job_tuning.dist, "destroy_process_group", destroyed)

    def start() -> None:
        tuning._resolution = Found("native")  # type: ignore[assignment]
        tuning._open_control()
        tuning.start(mock.Mock(side_effect=PlanError("models differ")), mock.Mock(), mock.Mock())

    with pytest.raises(PlanError, match="models differ"):
        {"search": tuning.resolve, "first engine": start}[fails]()
    destroyed.assert_called_once_with("group")
    assert tuning._control is None


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


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(("expected", "written"), [(0.1, False), (None, True)])
def test_a_plan_is_remembered_anew_if_the_trials_of_the_earlier_job_had_not_ended(
    tmp_path: Path, expected: float | None, written: bool, ended: bool
) -> None:
    entry = tuned()
    found = Preparation(JobLinks(CLUSTER, Constants()), workload(), entry.key, None, entry.plan.fingerprint, expected)
    tuner: Any = SimpleNamespace(
        present=Alternative(entry.plan, "byteps", 0.1), evidence=(entry.evidence.measured, []), passes=9, ended=ended
    )
    preparation.remember(found, tuner, str(tmp_path))
    kept = TuningCache(tmp_path).find(entry.key)
    assert (kept is not None) == written
    assert kept is None or kept.unfinished == (not ended)


@pytest.mark.parametrize(("earlier", "ended"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_job_that_ends_before_its_trials_leaves_the_plan_of_one_that_ended_them(
    tmp_path: Path, earlier: bool, ended: bool
) -> None:
    """It has not taken that plan, because links are slow today. They may recover."""
    cache, entry = TuningCache(tmp_path), tuned(unfinished=not earlier)
    cache.store(entry)
    plan = builders.ps(workload(), CLUSTER)
    tuner: Any = SimpleNamespace(
        present=Alternative(plan, "ps", 0.1), evidence=(entry.evidence.measured, []), passes=9, ended=ended
    )
    slow = CLUSTER.scaled(0.1)
    preparation.remember(Preparation(JobLinks(slow, Constants()), workload(), entry.key), tuner, str(tmp_path))
    kept = cache.find(entry.key)
    assert kept is not None
    assert (kept == entry) == (earlier and not ended)
    assert kept == entry or (kept.plan, kept.cluster) == (plan, slow)


def test_all_is_closed_if_a_plan_cannot_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobTuning(nn.Linear(1, 1), StrategySettings(tuning=TuningSettings()), 2, 1, None, None)
    tuner = mock.Mock(ended=False, trials=[mock.Mock(accepted=True)])
    job._tuner, job._resolution, job._control = tuner, Found("chosen"), mock.Mock()  # type: ignore[assignment]
    monkeypatch.setattr(job_tuning, "replace", mock.Mock())
    monkeypatch.setattr(job, "_remember", mock.Mock(side_effect=MemoryError))
    monkeypatch.setattr(job_tuning.dist, "destroy_process_group", mock.Mock())
    with pytest.raises(MemoryError):
        job.close()
    tuner.close.assert_called_once_with()
    assert job._control is None


@pytest.mark.parametrize(
    ("described", "links"),
    [(True, "3 hosts, described"), (False, "3 hosts, link speeds known from an earlier job on 2026-03-01")],
)
def test_the_links_of_a_remembered_plan_are_not_called_measured(described: bool, links: str) -> None:
    """The earlier job may have measured them or not."""
    entry = tuned()
    assert _of_entry(entry, workload(), entry.key, described, Constants()).links.describe() == links


@pytest.mark.parametrize("bucket_bytes", [None, 5000])
@pytest.mark.parametrize(
    ("remembered", "ddp", "tried"),
    [(0.1, 0.14, True), (0.1, 0.16, False), (0.1, None, True), (1e-4, None, False)],
)
def test_ddps_plan_is_not_tried_against_a_remembered_one_if_it_is_known_to_be_much_slower(
    remembered: float, ddp: float | None, tried: bool, bucket_bytes: int | None
) -> None:
    """The earlier job has measured it, or the links alone need 0.3 ms for it."""
    links, entry = JobLinks(CLUSTER, Constants()), tuned(bucket_bytes=bucket_bytes)
    plans = search_plans(workload(), links, TuningSettings(search=0.1), bucket_bytes)
    native = next(each.plan.fingerprint for each in plans if each.native)
    measured = entry.evidence.measured.model_copy(update={"seconds": remembered})
    compared = [] if ddp is None else [StepTime(name="ddp", plan=native, seconds=ddp, steps=8)]
    evidence = Evidence(measured=measured, compared=compared, synchronized_steps=9)
    entry = entry.model_copy(update={"evidence": evidence})
    found = _of_entry(entry, workload(), entry.key, False, Constants()).proposals
    assert found is not None
    assert found.plans[1].plan.fingerprint == native
    tuner = Tuner([_candidate(each) for each in found.plans], warm_up=1, passes=4)
    for _ in range(20):
        if tuner.opening is not None:
            tuner.opened()
        tuner.following()
        tuner.record(remembered)
    assert bool(tuner.trials) == tried


def alone(monkeypatch: pytest.MonkeyPatch, cluster: ClusterSpec, folder: Path, **tuning: Any) -> StrategySettings:
    """The settings of a job of three ranks on such links, of which only rank 0 runs, and that remembers in a folder."""
    monkeypatch.setattr(preparation, "agree", lambda find, *_: find())
    monkeypatch.setattr(preparation, "gather_json", lambda *_: ["x", "y", "z"])
    monkeypatch.setattr(preparation, "broadcast_json", lambda own, *_: own)
    monkeypatch.setattr(preparation.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(preparation, "find_links", lambda *_: proposals.JobLinks(cluster, Constants()))
    monkeypatch.setattr(preparation, "PREDICTOR", mock.Mock())
    monkeypatch.setattr(proposals, "_first_rank_result", lambda search, *_: search())
    return StrategySettings(tuning=TuningSettings(**{"search": 60.0, "cache": str(folder), **tuning}))


@dataclass
class Trained:
    """A job that an earlier one may have remembered a plan for."""

    module: nn.Module
    cluster: ClusterSpec
    settings: StrategySettings
    plans: list[SyncPlan]
    told: list[str]

    def prepare(self, plan: SyncPlan, **changes: Any) -> tuple[Preparation, list[Alternative]]:
        """What a job finds after one that ended before its trials with such a plan."""
        assert self.settings.tuning is not None
        fields = {"cluster": self.cluster, "unfinished": True, "origin": "best of trials", **changes}
        entry = tuned(describe(self.module), hosts=("x", "y", "z"), plan=plan, **fields)
        TuningCache(self.settings.tuning.cache).store(entry)
        found = preparation.prepare(self.settings, self.module, 3, 1)
        assert found.proposals is not None
        return found, list(found.proposals.plans)


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trained:
    """A job whose search finds the plans of two builders, the first one faster, and no others."""
    module, cluster = nn.Linear(300, 200), ClusterSpec.star(["800 Mbit/s", "200 Mbit/s", "200 Mbit/s"])
    model, told = describe(module), list[str]()
    plans = [builders.packed_trees(model, cluster), builders.all_reduce(model, cluster)]
    ranked = [Alternative(plans[0], "packed_trees", 0.1), Alternative(plans[1], NATIVE, 0.2, native=True)]
    monkeypatch.setattr(preparation, "propose", lambda *_: (Proposals(ranked, "packed_trees, as predicted"), ""))
    monkeypatch.setattr(preparation, "rank_zero_info", told.append)
    monkeypatch.setattr(
        preparation, "compare_with_job", mock.Mock(side_effect=AssertionError("links are measured twice"))
    )
    return Trained(module, cluster, alone(monkeypatch, cluster, tmp_path), plans, told)


@pytest.mark.parametrize("hosts", [["x", "x", "x"], ["x", "y", "z"]], ids=["one", "several"])
def test_the_process_that_searches_starts_before_links_of_several_hosts_are_measured(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = alone(monkeypatch, ClusterSpec.uniform(1, devices=3), tmp_path)
    started: list[int] = []
    predictor = mock.Mock(start=lambda: started.append(0))

    def find_links(*_: Any) -> JobLinks:
        assert len(started) == (len({*hosts}) > 1)
        return JobLinks(ClusterSpec.uniform(1, devices=3), Constants())

    monkeypatch.setattr(preparation, "gather_json", lambda *_: hosts)
    monkeypatch.setattr(preparation, "PREDICTOR", predictor)
    monkeypatch.setattr(preparation, "find_links", find_links)
    assert preparation.prepare(settings, nn.Linear(30, 20), 1, 3).on_one_host


BEGINS = "the fastest so far in the trials of an earlier job, which ended before them"


def test_a_job_that_goes_on_with_trials_says_what_prediction_would_choose(earlier: Trained) -> None:
    found, plans = earlier.prepare(earlier.plans[1])
    assert [each.plan for each in plans] == earlier.plans[::-1]
    assert found.remembered == earlier.plans[1].fingerprint
    assert found.proposals is not None
    assert found.proposals.reason == f"{NATIVE}, {BEGINS}; prediction alone would choose packed_trees, as predicted"


def test_a_job_whose_prediction_chooses_the_remembered_plan_says_so_once(earlier: Trained) -> None:
    found, plans = earlier.prepare(earlier.plans[0])
    assert [each.plan for each in plans] == earlier.plans
    assert found.proposals is not None
    assert found.proposals.reason == f"packed_trees, {BEGINS}"


def test_a_job_that_cannot_begin_with_the_remembered_plan_says_so(earlier: Trained) -> None:
    """The search had no time for it."""
    found, plans = earlier.prepare(builders.ps(describe(earlier.module), earlier.cluster))
    assert [each.plan for each in plans] == earlier.plans
    assert found.remembered is None
    assert earlier.told == [
        "AutoSync: the job does not begin with best of trials, the fastest so far in the trials of an earlier job, "
        "because that is not among the plans that may be tried"
    ]


def test_a_job_does_not_begin_with_a_plan_of_trials_on_other_rates(earlier: Trained) -> None:
    found, plans = earlier.prepare(earlier.plans[1], cluster=earlier.cluster.scaled(0.5))
    assert [each.plan for each in plans] == earlier.plans
    assert found.remembered is None
    (told,) = earlier.told
    assert told.startswith(f"{preparation._UNUSED}. ")
    assert "200 Mbit/s, but 100 Mbit/s before" in told


def test_a_search_goes_on_if_plans_of_other_jobs_cannot_be_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = alone(monkeypatch, CLUSTER, tmp_path, search=0.1)
    monkeypatch.setattr(TuningCache, "nearest", mock.Mock(side_effect=ZeroDivisionError("a test says so")))
    with pytest.warns(UserWarning, match=r"take no part in the search: ZeroDivisionError: a test says so"):
        found = preparation.prepare(settings, nn.Linear(30, 20), 3, 1)
    assert found.proposals is not None
    assert found.links.fault == ""


def test_a_job_prices_and_names_plans_that_jobs_on_other_hosts_have_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under a scheduler that gives other hosts each time, no entry has the key of a job."""
    module, cluster = nn.Linear(300, 200), ClusterSpec.star(["800 Mbit/s", "200 Mbit/s", "200 Mbit/s"])
    model = describe(module)
    plan = builders.packed_trees(model, cluster, bucket_bytes=7000)
    native = builders.all_reduce(model, cluster, bucket_bytes=7000)
    earlier = [
        tuned(model, cluster.scaled(0.9), hosts, plan=one, origin=origin)
        for hosts, one, origin in (
            (("a", "b", "c"), plan, f"packed_trees{preparation._OF_EARLIER_JOB} (2025-01-01)"),
            (("d", "e", "f"), native, NATIVE),
            (("g", "h", "i"), builders.ps(model, cluster).model_copy(update={"waits": True}), "ps, waiting"),
        )
    ]
    for entry in earlier:
        TuningCache(tmp_path).store(entry)
    settings = alone(monkeypatch, cluster, tmp_path)
    found = preparation.prepare(settings, module, 3, 1)
    assert found.remembered is None
    assert found.proposals is not None
    told = {each.name: each for each in found.proposals.plans if "earlier" in each.name}
    assert {name: each.plan for name, each in told.items()} == {
        "packed_trees, of an earlier job (2026-03-01)": plan,
        "ps, of an earlier job (2026-03-01)": builders.ps(model, cluster),
    }
    assert all(each.predicted > 0 for each in told.values())


def test_a_wrong_name_of_a_setting_of_tuning_suggests_the_nearest_one() -> None:
    with pytest.raises(
        DocumentError, match=r"^tuning\.prob: not known; did you mean 'probe'\? allowed: probe, search, "
    ):
        read_tuning({"prob": 5})
