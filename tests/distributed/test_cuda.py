"""Paths for accelerators: two gloo ranks that share one GPU, and NCCL alone. The same programs run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import cuda_calls
import pytest
import torch
from recommender import Recommender, workload_of
from training import Net

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.workload import describe

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=needs_gpu)]
CLUSTER = ClusterSpec.uniform(nodes=2, bandwidth=1e8)
ON_TREES = ["ring", "tree", "star", "packed", "recursive_doubling", "halving_doubling"]
SCRIPT = """
import sys
import torch
import lightning_autosync
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
torch.set_num_threads(1)
sums = []
for strategy in ("ddp", sys.argv[2]):
    seed_everything(3)
    module = BoringModel()
    Trainer(
        accelerator=sys.argv[1], devices=1, strategy=strategy, max_epochs=1, limit_train_batches=4, limit_val_batches=1,
        precision=sys.argv[3], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ).fit(module)
    sums.append([float(parameter.double().sum()) for parameter in module.parameters()])
assert sums[0] == sums[1], sums
"""


@pytest.fixture(scope="module")
def pair(pytestconfig) -> Iterator[WorkerPool]:
    tests = pytestconfig.rootpath / "tests"
    with WorkerPool(2, extra_paths=[tests, tests / "distributed"], timeout=120.0) as workers:
        yield workers


@pytest.fixture(scope="module")
def single(pytestconfig) -> Iterator[WorkerPool]:
    tests = pytestconfig.rootpath / "tests"
    with WorkerPool(1, extra_paths=[tests, tests / "distributed"], timeout=120.0) as workers:
        yield workers


def dense_plan(topology: str, **more: Any) -> SyncPlan:
    return builders.all_reduce(describe(Net().double()), CLUSTER, topology=topology, **more)


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_every_topology_sums_on_the_device(pair, device: str, side_stream: bool) -> None:
    plans = [dense_plan(topology, bucket_bytes=4000).to_dict() for topology in ("native", *ON_TREES)]
    arguments = {"device": device, "side_stream": side_stream}
    for found in pair.run(cuda_calls.distances, plans=plans, cluster=CLUSTER.to_dict(), **arguments):
        assert max(found) < 1e-10


@pytest.mark.parametrize("topology", ["native", "star"])
@pytest.mark.parametrize("device", DEVICES)
def test_waiting_where_parameters_are_used(pair, device: str, topology: str) -> None:
    plan = dense_plan(topology, bucket_bytes=4000).to_dict()
    assert max(pair.run(cuda_calls.overlapped, device=device, plan=plan, cluster=CLUSTER.to_dict())) < 1e-10


@pytest.mark.parametrize("topology", ["native", "star"])
@pytest.mark.parametrize("device", DEVICES)
def test_compressors_do_on_the_device_what_they_do_on_the_cpu(pair, device: str, topology: str) -> None:
    kinds = ("fp16", "bf16", "int8", "topk", "powersgd")
    plans = [dense_plan(topology, compressor=kind).to_dict() for kind in kinds]
    for found in pair.run(cuda_calls.compressed, device=device, plans=plans, cluster=CLUSTER.to_dict()):
        for kind, (from_cpu, from_rank_0) in zip(kinds, found, strict=True):
            assert from_rank_0 < 1e-12, kind
            # A value on the edge between two integers or ranks may fall to the other side.
            assert from_cpu < 1e-2, kind


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_touched_rows_on_the_device(pair, device: str, sparse: bool) -> None:
    workload = workload_of(Recommender(sparse=False).double(), "sparse" if sparse else "row_sparse")
    topologies = ("native", *ON_TREES)
    plans = [builders.all_reduce(workload, CLUSTER, topology=topology).to_dict() for topology in topologies]
    arguments = {"device": device, "sparse": sparse}
    for found in pair.run(cuda_calls.rows, plans=plans, cluster=CLUSTER.to_dict(), **arguments):
        assert max(found) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_a_world_of_one_by_native_collectives(single, device: str) -> None:
    assert single.run(cuda_calls.alone, device=device) == [[1.0, 2.0]]


@pytest.mark.parametrize("device", DEVICES)
def test_two_levels_wait_for_backward_and_are_waited_for(single, device: str) -> None:
    assert single.run(cuda_calls.two_levels, device=device) == [[0.0] * 3]


@pytest.mark.parametrize(
    "accelerator", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=needs_gpu)]
)
@pytest.mark.parametrize("plan", ["all_reduce", "ps"])
def test_a_trainer_whose_nodes_share_one_device(pair, accelerator: str, plan: str) -> None:
    found = pair.run(cuda_calls.trainer_over_one_device, accelerator=accelerator, plan=plan)
    assert found[0] == found[1]
    expected = pair.run(cuda_calls.trainer_over_one_device, accelerator="cpu", plan=plan)[0]
    assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("accelerator", "precision"),
    [
        pytest.param("cpu", "32-true", marks=pytest.mark.slow),
        pytest.param("gpu", "32-true", marks=needs_gpu),
        pytest.param("gpu", "16-mixed", marks=needs_gpu),
    ],
)
@pytest.mark.parametrize("strategy", ["autosync", "autosync_ps"])
def test_a_trainer_on_one_device_equals_ddp(accelerator: str, strategy: str, precision: str) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    command = [sys.executable, "-c", SCRIPT, accelerator, strategy, precision]
    variables = {**outside, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
