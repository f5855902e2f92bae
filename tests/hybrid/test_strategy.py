"""`AutoDDLStrategy` under a Trainer: the weights of DDP, checkpoints, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from shared_pool import SharedPool
from sweeps import sweep

from hybrid import jobs, setups


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"optimizer": "sgd", "gradient_clip_val": 0.1, "limit_val_batches": 2},
        pytest.param({"optimizer": "kept"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulation and clipping", "SGD and validation", "an optimizer that the module keeps"],
)
def test_trains_as_ddp_does(pair: SharedPool, options: dict[str, Any]) -> None:
    for found in pair.run(jobs.against_ddp, **options):
        assert found["distance"] < 1e-10
        assert found["loss"] < 1e-10
        assert found["steps"] == 8
        assert found["split"], "the module is whole again"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[4], [2, 2]])
def test_four_ranks(quartet: SharedPool, mesh: list[int]) -> None:
    for seed in (1, 2, 3):
        for found in quartet.run(jobs.against_ddp, seed=seed, mesh=mesh, gradient_clip_val=0.05):
            assert max(found["distance"], found["loss"]) < 1e-10


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one file", "folder"])
def test_checkpoints(pair: SharedPool, tmp_path: Path, sharded: bool) -> None:
    for rank, found in enumerate(pair.run(jobs.resumed, folder=str(tmp_path), sharded=sharded, seeds=[1, 2])):
        assert found["saved"] > 1e-3, "the second epoch changes the weights"
        assert max(found["distances"]) < 1e-10, "training goes on as if there had been no end, under any plan"
        if rank == 0:
            assert found["alone"] == 0.0, "plain torch reads it"


def test_statistics_of_a_layer_are_saved_by_one_rank(pair: SharedPool, tmp_path: Path) -> None:
    assert pair.run(jobs.saved_statistics, folder=str(tmp_path)) == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.slow
def test_resumes_on_another_mesh(quartet: SharedPool, tmp_path: Path) -> None:
    for found in quartet.run(jobs.resumed, folder=str(tmp_path), sharded=True, seeds=[1, 2], meshes=[[2, 2], [4]]):
        assert max(found["distances"]) < 1e-10


@pytest.mark.parametrize("precision", sweep(["bf16-mixed", "bf16-true"], ["bf16-true"]))
def test_narrow_precision(pair: SharedPool, precision: str) -> None:
    for theirs, their_first, ours, our_first in pair.run(jobs.narrow, precision=precision):
        assert ours == pytest.approx(theirs, rel=0.01)
        assert our_first == pytest.approx(their_first, rel=0.01)


@pytest.mark.parametrize("precision", sweep(["bf16-mixed", "bf16-true"], ["bf16-mixed"]))
def test_the_step_before_training_has_the_precision_of_training(pair: SharedPool, precision: str) -> None:
    for found in pair.run(jobs.precise, precision=precision):
        assert found["plan"], found["lines"]
        assert found["sizes"] == [2]
        assert found["dtypes"] == ["torch.bfloat16"]


def test_double_precision(pair: SharedPool) -> None:
    for found in pair.run(jobs.doubled):
        assert found["distance"] < 1e-12
        assert found["bits"] == 64


def test_validation_and_prediction(pair: SharedPool) -> None:
    for found in pair.run(jobs.predictions):
        assert found["during"] == pytest.approx(found["after"], abs=1e-9)
        assert found["predicted"] == 2


def test_without_a_cluster_it_is_data_parallel(pair: SharedPool) -> None:
    found = pair.run(jobs.searched, bandwidth=None)[0]
    assert found["distance"] == 0.0
    assert found["lines"] == ["AutoDDL: data parallelism: no cluster is described"]


def test_slow_links_are_spared(pair: SharedPool) -> None:
    found = pair.run(jobs.searched, bandwidth="10 Mbit/s")[0]
    assert found["distance"] < 1e-6
    (line,) = found["lines"]
    assert "on a mesh of 2" in line
    assert "data parallelism" in line


def test_interfaces_without_an_address_do_not_count(pair: SharedPool) -> None:
    for both, first in pair.run(jobs.without_an_address):
        assert both["plan"]
        assert both["lines"] == first["lines"]


def test_fast_links_keep_data_parallelism(pair: SharedPool) -> None:
    found = pair.run(jobs.searched, bandwidth="100 Gbit/s", width=16)[0]
    assert found["lines"][0].startswith("AutoDDL: data parallelism: no split of operators is more than 5% faster")


@pytest.mark.parametrize("largest", sweep([0, 1], [1]))
def test_rank_zero_decides_for_batches_of_different_shapes(pair: SharedPool, largest: int) -> None:
    ranks = pair.run(jobs.ragged, largest=largest)
    assert not any(found["plan"] for found in ranks)
    assert len({found["weight"] for found in ranks}) == 1
    *refused, last = ranks[0]["lines"]
    assert last.startswith("AutoDDL: data parallelism")
    shapes = "batch: its tensors have shapes [[8192, 64], [8192]] on rank 1, but [[4, 64], [4]] on rank 0"
    assert all("was rejected" in line and shapes in line for line in refused)
    assert bool(refused) == (largest == 1)


def test_ranks_that_find_unlike_plans_try_those_of_rank_zero(pair: SharedPool) -> None:
    first, second = pair.run(jobs.unlike_searches)
    assert first == second


def test_ranks_with_unlike_models_are_told(pair: SharedPool) -> None:
    told = "PlanError: model: parameter 'up.weight': shape is [768, 64] on rank 1, and [512, 64] on rank 0"
    assert all(told in found for found in pair.run(jobs.unlike_models))


def test_a_model_is_made_to_fit(pair: SharedPool) -> None:
    found = pair.run(jobs.searched, bandwidth="10 Gbit/s", memory="900 kB", width=512)[0]
    assert found["distance"] < 1e-6
    assert "data parallelism needs" in found["lines"][0]
    assert found["share"] < 0.75, "each rank has a part of the weights"


def test_a_plan_that_splits_nothing(pair: SharedPool) -> None:
    found = pair.run(jobs.all_data_parallel)[0]
    assert found["lines"] == ["AutoDDL: data parallelism: given by the argument 'plan'"]
    assert found["engine"] == "parameter_server"


@pytest.mark.parametrize("as_file", sweep([True, False], [True]))
def test_a_plan_for_gradients_is_data_parallelism(pair: SharedPool, as_file: bool) -> None:
    found = pair.run(jobs.synchronization, as_file=as_file)[0]
    (line,) = found["lines"]
    assert line.startswith("AutoDDL: data parallelism: ")
    assert re.search(r"read from '.*plan\.yaml'$" if as_file else "given by the argument 'plan'$", line)
    assert found["engine"] == "parameter_server"


def test_an_unknown_layer_is_data_parallel(pair: SharedPool) -> None:
    found = pair.run(jobs.unknown_layer)[0]
    assert found["distance"] < 1e-10
    assert "on a mesh of 2" in found["lines"][0]
    assert any("middle" in line and "GRU" in line for line in found["lines"][1:])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["up", "head", ""])
def test_compiled_parts(pair: SharedPool, part: str) -> None:
    found = pair.run(jobs.compiled, part=part)[0]
    splits, name = part != "head", repr(part) if part else "the model"
    assert found["kept"] != splits
    assert any(f"torch.compile is disabled for {name}," in line for line in found["lines"]) == splits


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("operator", "PlanError: plan: layers[0] ('up'): signature: Linear has no signature 'heads'"),
        ("uneven", "2 ranks cannot share it evenly"),
        ("mesh", "PlanError: plan: mesh: 3 is 3 ranks, but the job has 2"),
        ("model", "PlanError: plan: workload: it was made for another model"),
        ("module", "the model has no module 'up'"),
        ("relaxed", "PlanError: plan: 'partial_reduce' is a builder's name; AutoSyncStrategy takes these; allowed:"),
        pytest.param(
            "synchronous",
            "PlanError: plan: 'all_reduce' is a builder's name; AutoSyncStrategy takes these; allowed:",
            marks=pytest.mark.slow,
        ),
        ("compressed", "gradients: semantics are 'compressed'"),
        ("batches", "ExchangeError: batch: its tensors have shapes [[6, 64], [6]] on rank 1"),
        ("manual", "WorkloadError: the model uses manual optimization"),
        ("optimizer", "EquivalenceError: the split model does not compute the same as the unsplit one"),
        ("memory", "PlanError: memory: no plan fits into"),
        ("cluster", "ClusterError: cluster 'uniform': it has 7 ranks, but the job has 2"),
        ("scaler", "PlanError: precision:"),
        ("batch norm", "PlanError: sync_batchnorm=True: it is for whole layers, but this plan splits operators"),
        ("averaging", "PlanError: callbacks: StochasticWeightAveraging averages a copy of the whole model"),
        pytest.param(
            "moving average",
            "PlanError: callbacks: _Moving averages a copy of the whole model",
            marks=pytest.mark.slow,
        ),
        ("averaging on one rank", "PlanError: on rank 1 only: callbacks: _Moving averages a copy"),
        ("other plan", "PlanError: plan: rank 1 has "),
        pytest.param(
            "other memory",
            "PlanError: memory: rank 1 has 2000000000 bytes, but rank 0 has 1000000000 bytes",
            marks=pytest.mark.slow,
        ),
        ("other cluster", "PlanError: cluster: rank 1 has "),
        ("compressed file", "plan.yaml: its semantics are 'compressed'; allowed: a hybrid plan"),
        pytest.param(
            "relaxed file",
            "plan.yaml: its semantics are 'relaxed'; allowed: a hybrid plan",
            marks=pytest.mark.slow,
        ),
        pytest.param("served file", "plan.yaml: its servers step; allowed: a hybrid plan", marks=pytest.mark.slow),
        pytest.param("other file", "PlanError: plan: rank 1 has ", marks=pytest.mark.slow),
        ("buffer size", "PlanError: model: buffer 'own': shape is [2000] on rank 1, and [1000] on rank 0"),
        pytest.param(
            "buffer dtype",
            "PlanError: model: buffer 'own': dtype is torch.float64 on rank 1, and torch.float32 on rank 0",
            marks=pytest.mark.slow,
        ),
        ("data", "AutoSyncError: on rank 1 only: ValueError: the disk is gone"),
    ],
)
def test_refused(pair: SharedPool, case: str, told: str) -> None:
    assert all(told in found for found in pair.run(jobs.refused, case=case))


def test_data_parallelism_may_average_weights(pair: SharedPool) -> None:
    assert max(pair.run(jobs.averaged)) < 1e-6


def test_a_refused_plan_is_undone(pair: SharedPool) -> None:
    for found in pair.run(jobs.undone, job="odd"):
        assert found["error"].startswith("ExchangeError: batch:")
        assert found["whole"]
        assert not found["patched"]


def test_a_searched_plan_that_fails_gives_way(pair: SharedPool) -> None:
    for rank, found in enumerate(pair.run(jobs.undone, job="failing")):
        assert found["error"] == ""
        assert found["whole"]
        assert not found["patched"]
        if rank == 0:
            first = found["lines"][0]
            assert "was rejected: the training step that compares" in first
            assert "failed on rank 0, 1: RuntimeError: shapes do not fit" in first
            assert found["lines"][-1].startswith("AutoDDL: data parallelism")


@pytest.mark.parametrize(("job", "names"), [("clipping", "'down.bias'"), ("frozen", "'head.bias'")])
def test_copies_are_compared_when_training_ends(pair: SharedPool, job: str, names: str) -> None:
    for found in pair.run(jobs.drifted, job=job):
        assert found.startswith("ExchangeError: replicas differ")
        assert names in found


def test_layers_of_which_the_first_step_says_nothing_are_named(pair: SharedPool) -> None:
    lines = pair.run(jobs.gated)[0]
    assert any(
        "the comparison with the unsplit model does not test 'up', 'down': their gradients are zero" in line
        for line in lines
    )


@pytest.mark.slow
def test_pytorch_lightning(pair: SharedPool) -> None:
    assert max(pair.run(jobs.other_framework)) < 1e-6


def test_layers_are_replaced_as_under_ddp(pair: SharedPool) -> None:
    """As ``sync_batchnorm=True`` does."""
    theirs, ours = (pair.run(setups.replaced_layers, ddp=ddp) for ddp in (True, False))
    assert ours == theirs
    assert ours[0]["kinds"] == ["Tanh"] * 4
    assert ours[0]["after"] == "ReLU"


def test_an_evaluation_alone_takes_the_weights_of_rank_0_as_under_ddp(pair: SharedPool) -> None:
    theirs, ours = (pair.run(setups.evaluated_weights, ddp=ddp) for ddp in (True, False))
    assert ours == theirs
    assert ours[0] == ours[1]
