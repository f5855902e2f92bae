"""What cannot work fails at once, on every rank, with one clear message."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jobs
import lightning.fabric.strategies.launchers as fabric_launchers
import lightning.pytorch.strategies.launchers as pytorch_launchers
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_utilities.core.rank_zero import rank_zero_only
from sweeps import sweep

from lightning_autosync import AutoDDLStrategy, AutoSyncFabricStrategy, AutoSyncStrategy, SyncPlan
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import ClusterError, DocumentError, PlanError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.plan import builders
from lightning_autosync.workload import Variable, Workload

PLAIN = Workload(
    name="Plain",
    variables=(
        Variable(name="body.weight", shape=(8, 6)),
        Variable(name="body.bias", shape=(8,)),
        Variable(name="head.weight", shape=(3, 8)),
        Variable(name="head.bias", shape=(3,)),
    ),
)


def save_plan(path: Path, ranks: int = 2, **arguments: str) -> str:
    builders.all_reduce(PLAIN, ClusterSpec.uniform(ranks), **arguments).save(path)
    return str(path)


@pytest.fixture(autouse=True)
def not_launched(monkeypatch) -> None:
    """The constructor must believe that no process has been launched yet."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"semantics": "loose"}, ValueError, "'exact' or 'compressed' or 'relaxed'"),
        ({"scheduling": "fifo"}, ValueError, "'batch'"),
        ({"plan": "all_reduced"}, PlanError, r"all_reduced.*did you mean 'all_reduce'\? allowed: "),
        ({"plan": "missing.yaml"}, PlanError, r"^plan: missing\.yaml: cannot be read"),
        ({"plan": "packed_tree"}, PlanError, "did you mean 'packed_trees'"),
        ({"cluster": "missing.yaml"}, ClusterError, r"^cluster: missing\.yaml: cannot be read"),
        ({"cluster": "two_rack"}, ClusterError, "did you mean 'two_racks_"),
        ({"plan": 3}, PlanError, "expected a SyncPlan"),
        ({"cluster": "atlantis"}, ClusterError, "atlantis"),
        ({"bucket_size": 3}, TypeError, "bucket_size"),
        ({"ddp_comm_hook": print}, ValueError, "ddp_comm_hook.*compressor"),
        ({"model_averaging_period": 3}, ValueError, "model_averaging_period"),
        ({"plan": "ps", "bucket_cap_mb": 3}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb": 0}, ValueError, "above 0"),
        ({"bucket_cap_mb": "25"}, ValueError, "bucket_cap_mb: '25' is not a number of MiB above 0"),
    ],
)
def test_wrong_arguments_fail_before_anything_is_launched(arguments, error, words: str) -> None:
    with pytest.raises(error, match=words):
        AutoSyncStrategy(**arguments)


def test_a_malformed_file_fails_in_the_constructor(tmp_path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("format: autosync-plan/1\nworld_size: 2\n")
    with pytest.raises(PlanError, match=r"^plan: .*plan\.yaml: groups: missing"):
        AutoSyncStrategy(plan=path)


class LaunchedError(Exception):
    """Raised in place of starting ranks."""


def launched(*_: object, **__: object) -> None:
    raise LaunchedError


def test_batch_shares_of_another_number_are_refused_once_before_ranks_are_started(monkeypatch) -> None:
    launcher = pytorch_launchers.subprocess_script._SubprocessScriptLauncher
    monkeypatch.setattr(launcher, "_call_children_scripts", launched)

    def start(shares: list[int] | str) -> None:
        strategy = AutoSyncStrategy(batch_shares=shares)
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
        trainer.fit(BoringModel())

    with pytest.raises(PlanError, match="3 numbers were given, but the job has 2 ranks"):
        start([1, 2, 3])
    for shares in ([1, 2], "auto"):
        with pytest.raises(LaunchedError):
            start(shares)


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoSyncFabricStrategy, AutoDDLStrategy])
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_a_cluster_of_another_size_is_refused_once_before_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, strategy: type, start_method: str
) -> None:
    for launchers in (pytorch_launchers, fabric_launchers):
        monkeypatch.setattr(launchers.subprocess_script._SubprocessScriptLauncher, "_call_children_scripts", launched)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", launched)
    how = {} if strategy is AutoDDLStrategy else {"start_method": start_method}

    def start(ranks: int, call: str = "fit") -> None:
        given = strategy(cluster=ClusterSpec.uniform(ranks), **how)
        if strategy is AutoSyncFabricStrategy:
            Fabric(strategy=given, accelerator="cpu", devices=2).launch(launched)
        else:
            trainer = Trainer(strategy=given, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
            getattr(trainer, call)(BoringModel())

    with pytest.raises(ClusterError, match=r"cluster 'uniform': it has 3 ranks, but the job has 2 \(1 node x 2 dev"):
        start(3)
    with pytest.raises(LaunchedError):
        start(2)
    with pytest.raises(LaunchedError):  # validation does not use the cluster
        start(2 if strategy is AutoSyncFabricStrategy else 3, "validate")


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoSyncFabricStrategy])
def test_a_plan_for_other_ranks_is_refused_once_before_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, strategy: type, tmp_path: Path
) -> None:
    for launchers in (pytorch_launchers, fabric_launchers):
        monkeypatch.setattr(launchers.subprocess_script._SubprocessScriptLauncher, "_call_children_scripts", launched)

    def start(ranks: int) -> None:
        given = strategy(plan=save_plan(tmp_path / "plan.yaml", ranks))
        if strategy is AutoSyncFabricStrategy:
            Fabric(strategy=given, accelerator="cpu", devices=2).launch(launched)
        else:
            Trainer(strategy=given, accelerator="cpu", devices=2, logger=False, barebones=True).fit(BoringModel())

    with pytest.raises(
        PlanError, match=r"plan\.yaml: the plan is for 3 ranks, but the job has 2 \(1 node x 2 devices\)"
    ):
        start(3)
    with pytest.raises(LaunchedError):
        start(2)


def test_ranks_without_a_device_on_their_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a job on one host with ``num_nodes=2, devices=1``."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # so that it is put back: the strategy sets it, also for other tests
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    trainer = Trainer(strategy=AutoSyncStrategy(), accelerator="cpu", devices=1, num_nodes=2, barebones=True)
    with pytest.raises(DocumentError, match=r"^devices=1, num_nodes=2: local rank 1 has no device.*at least 2 ranks"):
        trainer.fit(BoringModel())


def test_semantics_above_the_allowed_fail_in_the_constructor(tmp_path) -> None:
    path = save_plan(tmp_path / "lossy.yaml", compressor="int8")
    with pytest.raises(PlanError, match=r"lossy\.yaml.*'compressed', but the strategy allows at most 'exact'"):
        AutoSyncStrategy(plan=path)
    AutoSyncStrategy(plan=SyncPlan.load(path), semantics="compressed")


def test_a_strategy_can_be_copied_before_launch(tmp_path) -> None:
    strategy = AutoSyncStrategy(plan=save_plan(tmp_path / "plan.yaml"), start_method="spawn")
    assert copy.deepcopy(strategy._settings) == strategy._settings


def test_a_hybrid_plan_is_for_another_strategy(tmp_path: Path) -> None:
    path = tmp_path / "split.yaml"
    HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),)).save(path)
    with pytest.raises(PlanError, match=r"split\.yaml: hybrid plans .* AutoDDLStrategy\(plan=.*, under the Trainer"):
        AutoSyncStrategy(plan=path)
    with pytest.raises(PlanError, match=r"plan: hybrid plans .* AutoDDLStrategy\(plan=.*, under the Trainer"):
        AutoSyncStrategy(plan=HybridPlan.load(path))


def test_autoddl_says_which_plans_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    ClusterSpec.uniform(2).save(path)
    both = r"expected 'autosync-hybrid/1' or 'autosync-plan/1'"
    with pytest.raises(PlanError, match=rf"cluster\.yaml: format: 'autosync-cluster/1' cannot be read; {both}"):
        AutoDDLStrategy(plan=path)
    path.write_text("mesh: [2]\n")
    with pytest.raises(PlanError, match=rf"cluster\.yaml: format: missing; {both}"):
        AutoDDLStrategy(plan=path)
    for wrong, told in ((3, "got int"), ("byte_ps", r"'byte_ps' is not a file \(.yaml, .yml, .json\)")):
        with pytest.raises(PlanError, match=rf"plan: {told}; allowed: a HybridPlan, an exact SyncPlan .*, or the file"):
            AutoDDLStrategy(plan=wrong)


@pytest.mark.parametrize("memory", ["lots", 0, "-4GB", True, "4 Gb"])
def test_autoddl_names_a_wrong_memory(memory: object) -> None:
    with pytest.raises(
        DocumentError, match=f"^memory: {memory!r} is not a size above 0: .*; allowed: None, bytes, or "
    ):
        AutoDDLStrategy(memory=memory)


@pytest.mark.parametrize("strategy", [AutoSyncStrategy, AutoSyncFabricStrategy, AutoDDLStrategy])
def test_a_misspelt_argument_names_the_class_and_the_nearest_argument(strategy: type) -> None:
    said = f"^{strategy.__name__}: got an unexpected keyword argument "
    with pytest.raises(TypeError, match=said + r"'plann'; did you mean 'plan'\?$"):
        strategy(plann="ps")
    with pytest.raises(TypeError, match=said + "'zzz'$"):
        strategy(zzz=1)


def same_error(found: list[str], *words: str) -> None:
    assert len(set(found)) == 1, found
    for word in words:
        assert word in found[0]


def test_a_plan_for_another_model(duo, tmp_path) -> None:
    path = save_plan(tmp_path / "plan.yaml")
    found = duo.run(jobs.error_of, model="Tied", plan=path)
    same_error(found, "PlanError", "plan.yaml", ["the model has no trainable parameter", "is in no group"][1])


def test_a_plan_for_another_number_of_ranks(duo, tmp_path) -> None:
    path = save_plan(tmp_path / "plan.yaml", ranks=3)
    same_error(
        duo.run(jobs.error_of, model="Plain", plan=path), "PlanError", "3 ranks", "the job has 2 (1 node x 2 devices)"
    )


def test_a_cluster_of_another_size(duo) -> None:
    found = duo.run(jobs.error_of, model="Plain", cluster="ring_of_four")
    same_error(found, "ClusterError", "ring_of_four", "4 ranks", "the job has 2")


def test_semantics_above_the_allowed(duo, tmp_path) -> None:
    path = save_plan(tmp_path / "plan.yaml", compressor="bf16")
    same_error(duo.run(jobs.error_of, model="Plain", plan=path), "PlanError", "'compressed'")


def test_a_file_that_one_rank_lacks(duo, tmp_path) -> None:
    save_plan(tmp_path / "plan-0.yaml")
    found = duo.run(jobs.error_of, model="Plain", plan=str(tmp_path / "plan-{rank}.yaml"))
    same_error(found, "PlanError", "on rank 1 only", "plan-1.yaml", "cannot be read")


def test_plans_that_differ_between_ranks(duo, tmp_path) -> None:
    save_plan(tmp_path / "plan-0.yaml")
    save_plan(tmp_path / "plan-1.yaml", topology="ring")
    found = duo.run(jobs.error_of, model="Plain", plan=str(tmp_path / "plan-{rank}.yaml"))
    same_error(found, "PlanError", "plan: rank 1 has ")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("frozen", "parameter 'head.bias': requires_grad is False on rank 1, and True on rank 0"),
        ("wider", "parameter 'body.weight': shape is [16, "),
        ("buffer", "buffer 'mark' exists on rank 1, but not on rank 0"),
    ],
)
def test_models_that_differ_between_ranks(duo, change: str, told: str) -> None:
    same_error(duo.run(jobs.odd_model, change=change), f"PlanError: model: {told}", "the same model on every rank")


def test_a_parameter_unfrozen_outside_the_users_plan(duo, tmp_path) -> None:
    head = PLAIN.model_copy(update={"variables": PLAIN.variables[2:]})
    path = tmp_path / "head.yaml"
    builders.all_reduce(head, ClusterSpec.uniform(2)).save(path)
    found = duo.run(jobs.error_of, model="ThawsAtOnce", plan=str(path))
    same_error(found, "PlanError", "head.yaml", "'body.weight' was unfrozen")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_backward_pass_that_breaks_off_on_one_rank_ends_all(duo, victim: int) -> None:
    found = duo.run(jobs.broken_backward, victim=victim)
    assert found[victim]["error"] == "MemoryError: no memory for this gradient"
    assert found[1 - victim]["error"] == (
        f"PeerLost: rank {victim} is lost: it ended with MemoryError: no memory for this gradient"
    )
    for rank in found:
        assert rank["closed"]
        assert rank["seconds"] < 10


UNEVEN: dict[str, dict[str, Any]] = {
    "default": {},
    "all_reduce": {"plan": "all_reduce"},
    "byteps": {"plan": "byteps"},
    "overlap": {"plan": "byteps", "overlap": "step"},
    "buffers": {"model": "Normalized"},
    "checkpoints": {"checkpoints": True},
    "validation": {"model": "Validates"},
}


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("case", sweep(UNEVEN, ["default", "overlap", "buffers", "checkpoints", "validation"]))
def test_different_numbers_of_batches_are_named_when_training_ends(duo, tmp_path, case: str, longer: int) -> None:
    found = duo.run(jobs.uneven_streams, longer=longer, folder=str(tmp_path), **UNEVEN[case])
    duo.live().close()  # collective calls that one rank began stay in the process group of the pool
    told = f"rank {1 - longer} had 2 batches until the end of training, but this rank ({longer}) is in batch 3"
    assert found[longer].startswith(f"ExchangeError: {told}"), found
    assert found[1 - longer].startswith(f"PeerLost: rank {longer} is lost: it ended with ExchangeError: {told}")


def test_one_rank_prints_the_traceback_of_an_error_that_all_ranks_raise(duo) -> None:
    first, other = duo.run(jobs.printed_error, cluster="ring_of_four")
    assert "Traceback" in first[0]
    assert len(other) == 1
    assert other[0].removeprefix("[rank1]: ") == first[-1].removeprefix("[rank0]: ")
    assert "ClusterError: cluster 'ring_of_four': it has 4 ranks, but the job has 2" in other[0]


def test_a_rank_that_fails_alone_prints_its_traceback(duo, tmp_path) -> None:
    save_plan(tmp_path / "plan-0.yaml")
    first, other = duo.run(jobs.printed_error, plan=str(tmp_path / "plan-{rank}.yaml"))
    assert len(first) == 1
    assert "Traceback" in other[0]


def test_nothing_to_train(duo) -> None:
    same_error(duo.run(jobs.error_of, model="AllFrozen"), "WorkloadError", "no trainable parameter")


def test_optimizers_that_step_within_the_backward_pass_are_refused(duo) -> None:
    found = duo.run(jobs.error_of, model="StepsEarly")
    same_error(found, "PlanError", "parameter 'body.weight' has an optimizer that steps within the backward pass")


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "1.0"), ("lightning-autosync", "9"), ("the plan's format", "autosync-plan/2")]
)
def test_versions_that_differ_between_ranks(duo, name: str, value: str) -> None:
    found = duo.run(jobs.error_of_meeting, odd=1, versions={name: value}, arguments={})
    same_error(found, f"ExchangeError: ranks run different versions of {name}: ", f"on rank 0; {value} on rank 1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"plan": "partial_reduce", "semantics": "relaxed"}, "consistency of the plan"),
        ({"broadcast_buffers": False}, "broadcast_buffers: rank {odd} has False, but rank 0 has True"),
        ({"check_replicas": 7}, "check_replicas"),
        ({"static_graph": True}, "static_graph"),
    ],
)
def test_settings_that_differ_between_ranks(duo, arguments: dict[str, object], words: str) -> None:
    found = duo.run(jobs.error_of_meeting, odd=1, versions={}, arguments=arguments)
    same_error(found, "PlanError", words.format(odd=1), "rank 1 has ")


def test_ranks_that_may_try_plans_need_the_same_python(duo) -> None:
    """Each of them chooses by its own arithmetic."""
    found = duo.run(jobs.error_with_other_python, odd=1, nodes=2)
    same_error(found, "PlanError: version of Python", "rank 1 has 3.9, but rank")


@pytest.mark.parametrize(
    "options", [{"nodes": 1}, {"nodes": 2, "tuning": "off"}, {"nodes": 2, "plan": "all_reduce"}], ids=str
)
def test_other_ranks_may_run_another_python(duo, options: dict[str, Any]) -> None:
    assert duo.run(jobs.error_with_other_python, odd=1, **options) == ["none"] * 2


def test_initial_buffers_that_differ_between_ranks(duo) -> None:
    """Only one rank would broadcast buffers, in the same message as the weights."""
    odd = {"forward_sync_buffers": False}
    found = duo.run(jobs.error_of_meeting, odd=1, versions={}, arguments=odd, common={"broadcast_buffers": False})
    told = "(broadcast_buffers or forward_sync_buffers): rank 1 has True, but rank 0 has False"
    same_error(found, "PlanError: initial buffers", told)
