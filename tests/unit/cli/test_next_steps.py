"""The lines after a search that say what to do with the plan."""

from __future__ import annotations

from pathlib import Path

from lightning_autosync import AutoDDLStrategy, AutoSyncStrategy
from lightning_autosync.cli.tune import next_steps
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.plan import builders
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(name="one", variables=(Variable(name="p", shape=(8,)),))


def test_a_compressed_plan_is_trained_with_its_semantics(tmp_path: Path) -> None:
    cluster, folder = ClusterSpec.uniform(2), tmp_path / "a run"
    folder.mkdir()
    plan = builders.build("all_reduce", WORKLOAD, cluster, compressor="int8")
    plan.save(folder / "plan.yaml")
    cluster.save(folder / "cluster.yaml")
    train, predict = next_steps(folder, plan)
    call = train.partition("strategy=")[2].removesuffix(", ...)")
    assert eval(call, {"AutoSyncStrategy": AutoSyncStrategy})._settings.plan == plan
    assert f"plan='{folder}/plan.yaml'" in predict


def test_a_plan_that_splits_operators_is_for_another_strategy(tmp_path: Path) -> None:
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),))
    plan.save(tmp_path / "plan.yaml")
    ClusterSpec.uniform(2).save(tmp_path / "cluster.yaml")
    (train,) = next_steps(tmp_path, plan)
    call = train.partition("strategy=")[2].removesuffix(", ...)")
    assert eval(call, {"AutoDDLStrategy": AutoDDLStrategy})._given == plan


def test_without_a_plan_nothing_is_told(tmp_path: Path) -> None:
    assert next_steps(tmp_path, None) == []
