"""What `autosync train` refuses before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.plan import builders
from lightning_autosync.training import job
from lightning_autosync.training.settings import TrainingSettings
from lightning_autosync.workload import Variable, Workload


@pytest.mark.parametrize(("world", "local"), [("5", "3"), ("5", "2"), ("6", "4")])
def test_nodes_with_different_numbers_of_ranks_are_refused(
    world: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(LaunchError, match=f"the job has {world} ranks, but not as many on each node"):
        job._torchrun_shape()


@pytest.mark.parametrize(("started", "remedy"), [(True, "or start 4 ranks"), (False, "or give ranks=4")])
def test_a_plan_for_other_ranks_tells_what_helps(started: bool, remedy: str, tmp_path: Path) -> None:
    workload = Workload(name="one", variables=(Variable(name="p", shape=(8,)),))
    builders.build("all_reduce", workload, ClusterSpec.uniform(4)).save(tmp_path / "plan.yaml")
    settings = TrainingSettings.parse(
        {"model": {"kind": "flat", "mib": 1.0}, "sync": {"plan": str(tmp_path / "plan.yaml")}}
    )
    with pytest.raises(PlanError, match=f"the plan is for 4 ranks, but the job has 3.*{remedy}"):
        job._plan_document(settings, 3, started)
