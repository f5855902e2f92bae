"""Training on accelerators: several ranks share one GPU, over gloo and over NCCL. The same programs run on the CPU.

Each scenario is a test of its own, and its ranks start again if it breaks them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_split_calls as splits
import cuda_trainer_calls as trainers
import cuda_training_calls as calls
import forked
import pytest
from device_ranks import TIMEOUT, WORLDS, DeviceRanks, OneDevice, needs_gpu
from ports import free_port

EXACT = 1e-9
"""Of weights in double precision: devices add up in other orders."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "chosen": {"strategy": {"name": "autosync"}},
    "one server": {"strategy": {"name": "autosync", "plan": {"builder": "ps"}}},
    "native shards": {
        "strategy": {"name": "autosync", "plan": {"builder": "partitioned_all_reduce", "topology": "native"}}
    },
    "ring": {"strategy": {"name": "autosync", "plan": {"builder": "all_reduce", "topology": "ring"}}},
    "views": {"strategy": {"name": "autosync", "gradient_as_bucket_view": True}},
    "compared often": {"strategy": {"name": "autosync", "check_replicas": 2}},
    "delayed": {"strategy": {"name": "autosync"}, "kind": "delayed"},
    "delayed, staged": {"strategy": {"name": "autosync", "plan": {"builder": "ps"}}, "kind": "delayed"},
    "accumulated": {"strategy": {"name": "autosync"}, "accumulate_grad_batches": 2},
    "clipped": {"strategy": {"name": "autosync"}, "gradient_clip_val": 0.1},
    "statistics": {"strategy": {"name": "autosync"}, "kind": "normed", "limit_val_batches": 2, "val_check_interval": 3},
    "unused": {"strategy": {"name": "autosync"}, "kind": "unused"},
    "unused, staged": {"strategy": {"name": "autosync", "plan": {"builder": "ps"}}, "kind": "unused"},
    "split": {"strategy": {"name": "autoddl"}},
    "split, accumulated and clipped": {
        "strategy": {"name": "autoddl", "seed": 2},
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
}
TWO_MESSAGES = {"builder": "all_reduce", "topology": "star", "bucket_bytes": 864}
OVERLAPS: dict[str, dict[str, Any]] = {
    "native": {"plan": {"builder": "all_reduce", "topology": "native", "bucket_bytes": 864}},
    "one server": {"plan": {"builder": "ps"}},
    "trees": {},
    "checked": {"overlap_debug": True},
    "views": {"gradient_as_bucket_view": True},
    "two streams": {"kind": "sides"},  # of layers whose parameters share a message
    "delayed": {"kind": "delayed"},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "statistics": {"kind": "normed", "limit_val_batches": 2, "val_check_interval": 3},
    "unused": {"kind": "unused"},
    "compared often": {"check_replicas": 2},
    "shares": {"batch_shares": [1, 1]},
}
"""Arguments of a strategy whose steps overlap, with `TWO_MESSAGES` unless they have a plan, and of the Trainer."""
ARGUMENTS = ("plan", "overlap_debug", "gradient_as_bucket_view", "check_replicas", "batch_shares")
INT8 = {"kind": "int8", "error_feedback": True}
SERVED = {"builder": "byteps", "consistency": {"mode": "synchronous", "served": True}}
EVERY_STEP = {"mode": "periodic", "period": 1, "outer": "averaging"}
IN_STEP: dict[str, dict[str, Any]] = {
    "average of every step": {
        "builder": "all_reduce",
        "consistency": {"mode": "periodic", "period": 1, "outer": "averaging"},
    },
    "served": SERVED,
}
"""Relaxed plans, and plans with servers, by which plain SGD does what it does under DDP."""
RELAXED: dict[str, dict[str, Any]] = {
    "partial reduce": {
        "builder": "all_reduce",
        "consistency": {"mode": "partial_reduce", "group_size": 2, "weighting": "dynamic", "momentum": "average"},
    },
    "periodic": {"builder": "all_reduce", "consistency": {"mode": "periodic", "period": 3, "outer": "diloco"}},
    "bounded staleness": {"builder": "byteps", "consistency": {"mode": "bounded_staleness", "staleness": 2}},
    "asynchronous": {"builder": "byteps", "consistency": {"mode": "asynchronous"}},
}
NATIVE = {
    "native": ["all_reduce", {"topology": "native"}],
    "native in small messages": ["all_reduce", {"topology": "native", "bucket_bytes": 2000}],
    "native by owners": ["byteps", {"topology": "native"}],
    "star": ["all_reduce", {"topology": "star"}],
    "ring": ["all_reduce", {"topology": "ring", "bucket_bytes": 2000}],
}
TWO_LEVELS = {
    "two levels": ["hierarchical", {"topology": "hierarchical"}],
    "two levels in parts": ["partitioned_all_reduce", {"topology": "hierarchical"}],
}
Expected = Callable[..., Any]


@pytest.fixture(scope="module", params=WORLDS)
def two(request) -> Iterator[DeviceRanks]:
    yield from ranks(2, *request.param)


@pytest.fixture(scope="module", params=WORLDS)
def four(request) -> Iterator[DeviceRanks]:
    yield from ranks(4, *request.param)


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """What two ranks on the CPU find; each call is made once."""
    known: dict[str, Any] = {}
    with_cpu = DeviceRanks(2, "cpu", "gloo")

    def find(function: Callable[..., Any], **arguments: Any) -> Any:
        key = f"{function.__name__} {sorted(arguments.items())}"
        if key not in known:
            known[key] = with_cpu.run(function, **arguments)
        return known[key]

    yield find
    with_cpu.close()


def ranks(size: int, device: str, backend: str) -> Iterator[DeviceRanks]:
    made = DeviceRanks(size, device, backend)
    yield made
    made.close()


def near(one: list[float], other: list[float], limit: float = EXACT) -> None:
    assert trainers.apart(one, other) < limit


# Trainers


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_trainer_does_what_ddp_does_on_the_cpu(two: DeviceRanks, expected: Expected, name: str) -> None:
    scenario = STRATEGIES[name]
    reference = expected(trainers.trained, **{**scenario, "strategy": {"name": "ddp"}})
    for found, theirs in zip(two.run(trainers.trained, **scenario), reference, strict=True):
        near(found["weights"], theirs["weights"])
        assert found["device"] == two.device
        assert found["moved"] > 0.01


def test_both_layers_on_streams_of_their_own_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = trainers.make_plan(trainers.Learner(), **TWO_MESSAGES)
    first = {name.split(".")[0] for name in plan.groups[0].variables}
    assert first == {"head", "extra"}


@pytest.mark.parametrize("name", OVERLAPS)
def test_steps_that_overlap_do_what_ddp_does(two: DeviceRanks, expected: Expected, name: str) -> None:
    scenario = OVERLAPS[name]
    arguments = {key: value for key, value in scenario.items() if key in ARGUMENTS}
    options = {key: value for key, value in scenario.items() if key not in ARGUMENTS}
    strategy = {"name": "autosync", "plan": TWO_MESSAGES, "overlap": "step", **arguments}
    reference = expected(trainers.trained, strategy={"name": "ddp"}, **options)
    for found, theirs in zip(two.run(trainers.trained, strategy=strategy, **options), reference, strict=True):
        near(found["weights"], theirs["weights"])
        assert found["overlapped"] >= 4, "of 8 batches"
        assert found["device"] == two.device


def test_ddp_on_the_device_is_a_reference(two: DeviceRanks, expected: Expected) -> None:
    """If this fails, the device's own arithmetic is another one, and no other test says anything."""
    alone = expected(trainers.alone)[0]
    for found in two.run(trainers.trained, strategy={"name": "ddp"}):
        near(found["weights"], alone["weights"])


@pytest.mark.parametrize("plan", [None, "ps"])
def test_a_layer_that_trains_later(two: DeviceRanks, expected: Expected, plan: str | None) -> None:
    alone, plain = expected(trainers.alone, kind="thawed")[0], expected(trainers.alone)[0]
    assert trainers.apart(alone["weights"], plain["weights"]) > 1e-3
    for found in two.run(trainers.trained, strategy={"name": "autosync", "plan": plan}, kind="thawed"):
        near(found["weights"], alone["weights"])


@pytest.mark.parametrize("name", IN_STEP)
def test_relaxed_plans_that_keep_in_step(two: DeviceRanks, expected: Expected, name: str) -> None:
    reference = expected(trainers.trained, strategy={"name": "ddp"}, momentum=0.0)[0]
    for found in two.run(trainers.trained, strategy={"name": "autosync", "plan": IN_STEP[name]}, momentum=0.0):
        near(found["weights"], reference["weights"])
        assert found["device"] == two.device


@pytest.mark.parametrize("kind", ["delayed", "normed"])
@pytest.mark.parametrize("name", RELAXED)
def test_relaxed_plans_learn_and_end_alike(two: DeviceRanks, name: str, kind: str) -> None:
    strategy = {"name": "autosync", "plan": RELAXED[name]}
    options: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 2, "momentum": 0.0}
    first, second = two.run(trainers.trained, strategy=strategy, kind=kind, **options)
    if kind == "normed":  # the last of its numbers counts the batches of each rank
        first["weights"].pop(), second["weights"].pop()
    near(first["weights"], second["weights"], 1e-12)
    assert first["fell"] + second["fell"] > 0.05, "they have learned"
    assert first["device"] == second["device"] == two.device


@pytest.mark.parametrize("shares", [[3, 1], [1, 7], "auto"], ids=str)
def test_batch_shares(two: DeviceRanks, expected: Expected, shares: list[int] | str) -> None:
    alone = expected(trainers.alone)[0]
    strategy = {"name": "autosync", "batch_shares": shares}
    for found in two.run(trainers.trained, strategy=strategy):
        near(found["weights"], alone["weights"])


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "momentum": {"strategy": {"name": "autosync"}},
    "overlap": {"strategy": {"name": "autosync", "plan": TWO_MESSAGES, "overlap": "step"}},
    "native int8": {
        "strategy": {
            "name": "autosync",
            "plan": {
                "builder": "all_reduce",
                "topology": "native",
                "compressor": {"kind": "int8", "error_feedback": True},
            },
        }
    },
    "staged top-k": {
        "strategy": {
            "name": "autosync",
            "plan": {"builder": "all_reduce", "topology": "star", "compressor": {"kind": "topk", "ratio": 0.2}},
        }
    },
    "power iterations": {
        "strategy": {
            "name": "autosync",
            "plan": {"builder": "all_reduce", "topology": "native", "compressor": {"kind": "powersgd", "rank": 2}},
        }
    },
    "periodic": {"strategy": {"name": "autosync", "plan": RELAXED["periodic"]}},
    "served": {"strategy": {"name": "autosync", "plan": SERVED}},
    "split": {"strategy": {"name": "autoddl"}},
    "split, in a folder": {"strategy": {"name": "autoddl", "save_distributed_checkpoint": True}},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_training_resumes_from_a_checkpoint(two: DeviceRanks, tmp_path: Path, name: str) -> None:
    for found in two.run(trainers.resumed, folder=str(tmp_path), **CHECKPOINTS[name]):
        assert found["second"] > 1e-3, "the second epoch changes the weights"
        near([found["resumed"]], [0.0])


@pytest.mark.parametrize("poisoned", [True, False], ids=["one rank overflows", "all ranks overflow"])
@pytest.mark.parametrize("overlap", [None, "step"])
@pytest.mark.parametrize("plan", [None, "ps"])
def test_steps_that_overflow_are_skipped_by_all(
    two: DeviceRanks, plan: str | None, overlap: str | None, poisoned: bool
) -> None:
    options = {"poisoned": poisoned, "first": 2.0**10 if poisoned else 2.0**20}
    reference = two.run(trainers.overflowing, strategy={"name": "ddp"}, **options)
    found = two.run(trainers.overflowing, strategy={"name": "autosync", "plan": plan, "overlap": overlap}, **options)
    for ours, theirs in zip(found, reference, strict=True):
        near(ours["weights"], theirs["weights"], 1e-3)
        assert ours["scale"] == theirs["scale"] < options["first"]


@pytest.mark.parametrize("topology", ["native", "star"])
def test_an_overflow_leaves_no_trace_in_error_feedback(two: DeviceRanks, topology: str) -> None:
    plan = {"builder": "all_reduce", "topology": topology, "compressor": INT8}
    strategy = {"name": "autosync", "plan": plan}
    first, second = two.run(trainers.overflowing, strategy=strategy)
    near(first["weights"], second["weights"], 1e-12)
    reference = two.run(trainers.overflowing, strategy={"name": "ddp"})[0]
    near(first["weights"], reference["weights"], 0.1)
    assert first["scale"] == second["scale"] == reference["scale"]


LAUNCHED = """
import json, sys, torch, cuda_trainer_calls
torch.set_num_threads(1)
found = [cuda_trainer_calls.trained(sys.argv[1], strategy={"name": name})["weights"] for name in sys.argv[2:]]
print(json.dumps([found, torch.distributed.get_backend()]))
"""
"""A rank whose Trainer makes the process group: on a device, NCCL's, to which the device is bound."""


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=needs_gpu)])
def test_ranks_whose_trainers_make_the_process_group(device: str) -> None:
    environment = OneDevice().environments(2, free_port())
    command = [sys.executable, "-c", LAUNCHED, device, "ddp", "autosync", "autoddl"]
    start = forked.Popen if device == "cpu" else subprocess.Popen
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [start(command, env=environment[rank], **pipes) for rank in range(2)]
    try:
        said = [one.communicate(timeout=TIMEOUT) for one in running]
    finally:
        for one in running:
            one.kill()
    for out, errors in said:
        assert out.startswith("["), errors
        (reference, *found), backend = json.loads(out.splitlines()[-1])
        assert backend == ("gloo" if device == "cpu" else "nccl")
        for each in found:
            near(each, reference)


# Engines


def test_plans_equal_ddp(two: DeviceRanks) -> None:
    for found in two.run(calls.against_ddp, plans=NATIVE, nodes=2):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant checkpoints"])
def test_devices_that_are_slower_than_the_host(two: DeviceRanks, reentrant: bool, side: bool) -> None:
    for found in two.run(calls.delayed, plans=NATIVE, reentrant=reentrant, side=side):
        assert max(found.values()) < EXACT, found


def test_a_group_of_the_device_beside_gloo(two: DeviceRanks) -> None:
    if two.backend != "gloo":
        pytest.skip("the default group is the device's own")
    assert two.run(calls.late, seconds=0.5) == [[0.5, 1.0, 1.5]] * 2


def test_two_places_of_two(four: DeviceRanks) -> None:
    if four.device == "cuda" and four.backend == "gloo":
        pytest.skip("gloo has no reduce-scatter on devices")
    for found in four.run(calls.against_ddp, plans={**TWO_LEVELS, **NATIVE}, nodes=2, devices=2):
        assert max(found.values()) < EXACT, found


def test_plans_that_change_while_training(two: DeviceRanks) -> None:
    for found in two.run(calls.switched, topologies=["native", "star", "ring"], rounds=4):
        assert found["distance"] < EXACT
        assert found["left"] <= 0, "bytes on the device that earlier plans left"


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("topology", ["native", "star"])
def test_accumulated_gradients(two: DeviceRanks, topology: str, as_views: bool) -> None:
    assert max(two.run(calls.accumulated, topology=topology, as_views=as_views)) < EXACT


def test_small_collectives(two: DeviceRanks) -> None:
    answers = two.run(calls.small_collectives)
    for rank, answer in enumerate(answers):
        for found in answer.values():
            assert found["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
            assert found["broadcast"] == [0, "ü"]
            assert found["tensors"] == [0.0, 0.0]
            assert found["state"] == ([0.0, 4.0] if rank == 0 else None)
            assert found["fault"] == "OpeningError: rank 1: broken"
            assert "'weight' on rank 1" in found["replicas"]
            assert found["device"] == ("cuda" if two.backend == "nccl" else "cpu")


# Split models


@pytest.mark.parametrize("model", ["mlp", "vgg", "fused", "fused again", "encoder", "biased", "language"])
def test_split_models_train_as_one_process_does(two: DeviceRanks, model: str) -> None:
    for found in two.run(splits.split_distances, models=[model], meshes=[[2]], seeds=[1, 2]):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("model", ["mlp", "separate"])
def test_split_models_on_four_ranks(four: DeviceRanks, model: str) -> None:
    for found in four.run(splits.split_distances, models=[model], meshes=[[4], [2, 2]], seeds=[1, 2]):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("mesh", [[4], [2, 2]])
def test_autoddl_on_four_ranks_does_what_ddp_does(four: DeviceRanks, mesh: list[int]) -> None:
    reference = four.run(trainers.trained, strategy={"name": "ddp"})[0]
    for found in four.run(trainers.trained, strategy={"name": "autoddl", "mesh": mesh}):
        near(found["weights"], reference["weights"])


def test_split_values_meet_numbers_on_the_cpu(two: DeviceRanks) -> None:
    assert two.run(splits.compared) == [{"said": "", "norm of nothing": 0.0}] * 2


# Fabric


@pytest.mark.parametrize("plain_backward", [False, True], ids=["fabric.backward", "loss.backward"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("overlap", [None, "step"])
def test_fabric_does_what_ddp_does(
    two: DeviceRanks, expected: Expected, overlap: str | None, together: bool, plain_backward: bool
) -> None:
    reference = expected(calls.with_fabric, ours=False, plain_backward=False)[0]
    options = {"plain_backward": plain_backward, "together": together, "overlap": overlap}
    for found in two.run(calls.with_fabric, ours=True, **options):
        near(found, reference)
