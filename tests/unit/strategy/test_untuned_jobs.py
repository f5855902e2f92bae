"""Which jobs measure no links and search no plans: one process, without links."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_autosync import AutoSyncFabricStrategy, AutoSyncStrategy
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.strategy import agreement, resolution
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.tuning import job_tuning
from lightning_autosync.strategy.tuning.job_tuning import JobTuning
from lightning_autosync.strategy.tuning.settings import TuningSettings

NODE = ClusterSpec.uniform(nodes=1, devices=2, name="one node")


def preparations(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    others: bool = False,
    python: str | None = None,
    device: str = "cpu",
    tuning: TuningSettings | None = None,
    **settings: Any,
) -> tuple[int, str]:
    """How often a job prepares its tuning, and what it tells of it.

    Args:
        others: whether deterministic algorithms are on on another rank.
        python: version of Python of another rank; None for the own one.
    """
    other = {} if python is None else {"identity": {job_tuning._PYTHON: python}}
    monkeypatch.setattr(agreement, "gather_json", lambda own, group: [own, own | other])
    monkeypatch.setattr(agreement.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(JobTuning, "_device", device)
    monkeypatch.setattr(JobTuning, "_measured_on_device", lambda self, found, also: found)
    prepared = mock.Mock()
    prepared.return_value.on_one_host = False
    monkeypatch.setattr(job_tuning, "prepare", prepared)
    monkeypatch.setattr(job_tuning, "gather_json", lambda own, group: [own, others])
    chosen = StrategySettings(tuning=tuning or TuningSettings(), **settings)
    job = JobTuning(nn.Linear(2, 2), chosen, nodes, 2, None, None)
    found = job._prepare(())
    assert (found is not None) == prepared.called
    return prepared.call_count, job._ended


def test_a_job_on_several_nodes_prepares_its_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preparations(monkeypatch, nodes=2)[0] == 1


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoSyncFabricStrategy])
def test_auto_is_an_unknown_cluster(strategy: Any) -> None:
    assert strategy(cluster="auto")._settings == strategy()._settings
    assert strategy(cluster="auto")._settings.cluster is None
    assert strategy(cluster="four_equal")._settings.cluster is not None


@pytest.mark.parametrize(("nodes", "cluster"), [(1, None), (2, NODE)])
def test_a_job_on_one_machine_does_not(monkeypatch: pytest.MonkeyPatch, nodes: int, cluster: Any) -> None:
    expected = 0, "no other plan is tried: all ranks run on one machine"
    assert preparations(monkeypatch, nodes, cluster=cluster) == expected


@pytest.mark.parametrize("others", [False, True])
def test_a_job_does_not_if_algorithms_are_deterministic_on_any_rank(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not others)
    count, told = preparations(monkeypatch, nodes=2, others=others)
    assert count == 0
    assert told.startswith("no other plan is tried: torch's deterministic algorithms are on")


@pytest.mark.parametrize("options", [{}, {"device": "cuda", "tuning": TuningSettings(accelerators=True)}], ids=str)
def test_a_job_that_may_try_plans_needs_the_same_python_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    with pytest.raises(PlanError, match=r"version of Python .*: rank 1 has 3\.9, but rank 0 has 3\.\d+; use the same"):
        preparations(monkeypatch, nodes=2, python="3.9", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 1},
        {"nodes": 2, "cluster": NODE},
        {"nodes": 2, "device": "cuda"},
        {"nodes": 2, "tuning": TuningSettings(probe=0)},
        {"nodes": 2, "others": True},
    ],
    ids=str,
)
def test_a_job_that_tries_no_plans_needs_no_equal_versions_of_python(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert preparations(monkeypatch, python="3.9", **options)[0] == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, []),
        ({"overlap": "step"}, ["overlap='step' has no effect, because the ranks of one machine sum"]),
        (
            {"semantics": "compressed"},
            ["semantics='compressed' has no effect, because the job .* gradients: all ranks run on one machine$"],
        ),
        (
            {"semantics": "relaxed"},
            ["semantics='relaxed' has no effect, because no relaxed plan is given, and the job"],
        ),
        ({"semantics": "compressed", "plan": "all_reduce"}, []),
        ({"overlap": "step", "plan": "all_reduce"}, []),
    ],
    ids=str,
)
def test_the_log_says_which_settings_have_no_effect_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], told: list[str]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(job_tuning, "rank_zero_info", lines.append)
    monkeypatch.setattr(job_tuning, "memory_fault", lambda *_: "")
    monkeypatch.setattr(job_tuning, "shared_cores", lambda: 2)
    monkeypatch.setattr(JobTuning, "_two_level_collectives", False)
    monkeypatch.setattr(
        job_tuning,
        "resolve_together",
        lambda settings, module, nodes, devices, group, **options: resolution.resolve(
            settings, module, nodes, devices, **options
        ),
    )
    JobTuning(nn.Linear(2, 2), StrategySettings(tuning=TuningSettings(), **settings), 1, 2, None, None).resolve()
    assert lines[0].startswith("AutoSync: plan ")
    for line, words in zip(lines[1:], told, strict=True):
        assert re.search(words, line)
