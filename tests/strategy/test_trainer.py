"""Training under AutoSync ends where DDP ends, whatever a LightningModule and its Trainer do."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
from sweeps import sweep

PAIR = {"format": "autosync-cluster/1", "name": "pair", "uniform": {"nodes": 2, "bandwidth": "1 Gbit/s"}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": "Plain"},
    "accumulation": {"model": "Plain", "accumulate_grad_batches": 3},
    "clipping by norm": {"model": "Plain", "gradient_clip_val": 0.05},
    "clipping by value": {
        "model": "Plain",
        "gradient_clip_val": 0.02,
        "gradient_clip_algorithm": "value",
    },
    "bf16-mixed": {"model": "Plain", "precision": "bf16-mixed"},
    "bf16-true": {"model": "Plain", "precision": "bf16-true"},
    "64-true": {"model": "Plain", "precision": "64-true"},
    "gradient scaler": {"model": "Plain", "half": True, "gradient_clip_val": 0.1},
    "scheduler": {"model": "Scheduled"},
    "frozen": {"model": "Frozen"},
    "unused": {"model": "Unused"},
    "unused, accumulation": {"model": "Unused", "accumulate_grad_batches": 2},
    "tied": {"model": "Tied"},
    "buffers": {"model": "Normalized"},
    "buffers, accumulation": {"model": "Normalized", "accumulate_grad_batches": 2},
    "activation checkpoints": {"model": "Checkpointed"},
    "reentrant activation checkpoints": {"model": "Reentrant"},
    "two optimizers": {"model": "Adversarial"},
    "two optimizers, untoggled": {"model": "Untoggled"},
    "two optimizers, accumulation": {"model": "Accumulates"},
    "two optimizers, accumulation in place": {"model": "AccumulatesInPlace"},
    "sparse embedding": {"model": "SparseTable"},
    "large embedding": {"model": "DenseTable"},
    "compiled part": {"model": "Compiled", "reference": "Plain"},
    "thawing": {"model": "Thaws", "reference": "ThawsLate"},
    "freezing": {"model": "ThawsLate"},
    "gradients seen": {"model": "SeesGradients"},
    "parameter servers": {"model": "Unused", "strategy": {"plan": "ps_load_balancing"}},
    "packed trees": {"model": "Plain", "strategy": {"plan": "packed_trees", "cluster": PAIR}},
    "small buckets": {"model": "Adversarial", "strategy": {"bucket_cap_mb": 1e-4}},
}


# Relatives of others, and what test_overlap.py, test_job_tuning.py or test_parity.py runs by other plans.
LONG = (
    "clipping by value", "bf16-true", "unused, accumulation", "buffers, accumulation", "activation checkpoints",
    "two optimizers, accumulation", "two optimizers, untoggled", "freezing", "tied", "64-true", "frozen",
    "two optimizers, accumulation in place", "compiled part", "sparse embedding", "buffers",
    "reentrant activation checkpoints", "two optimizers",
)  # fmt: skip


@pytest.mark.parametrize("case", sweep(CASES, [case for case in CASES if case not in LONG]))
def test_equals_ddp(duo, case: str) -> None:
    for found in duo.run(jobs.compare, **CASES[case]):
        assert found["distance"] < 1e-6
        assert found["moved"] > 1e-3
        assert found["notes"].get("largest_difference", 0.0) == 0.0
        assert found["notes"].get("never_got_gradients", True)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_frozen_parameter_does_not_disturb_live_ones_in_its_message(duo, error_feedback: bool) -> None:
    compressor = {"kind": "int8", "error_feedback": error_feedback}
    for gap in duo.run(jobs.live_beside_frozen, compressor=compressor):
        assert gap < 0.02


@pytest.mark.slow
def test_a_compiled_module_equals_ddp(duo) -> None:
    assert max(duo.run(jobs.compiled_whole)) < 1e-6


def test_buffers_are_left_alone_if_so_asked(duo) -> None:
    arguments = {"model": "Normalized", "max_epochs": 1}
    assert duo.run(jobs.replicas_equal, strategy={"broadcast_buffers": False}, **arguments)[1] > 0.1


def test_validation_sees_the_buffers_of_rank_0(duo) -> None:
    first, second = duo.run(jobs.evaluation_buffers)
    assert first == second
    assert len(set(first)) > 1


def test_every_loop(duo) -> None:
    first, second = duo.run(jobs.all_loops)
    assert first["rank"] == second["rank"] == 0.5
    assert first["sampler"]
    assert first["engine_closed"]
    assert first["plan"] == second["plan"]
    assert first["messages"] == len(first["plan"]["groups"])
    assert first["val"] == second["val"] == first["test"]
    assert first["predicted"] == 16
    assert first["epochs"] == 2


def test_large_tables_travel_by_rows(duo) -> None:
    for rows in duo.run(jobs.by_rows)[0].values():
        assert sorted(rows)[-1] == 5000


@pytest.mark.parametrize("compressor", sweep([None, "int8", "powersgd"], [None, "powersgd"]))
def test_resumed_training_equals_uninterrupted(duo, tmp_path, compressor: str | None) -> None:
    for found in duo.run(jobs.resume, folder=str(tmp_path), plan=compressor):
        assert found["distance"] < 1e-6
        assert (found["shapes"] is None) == (compressor is None)
        assert not found["warnings"]


def test_compressor_state_of_another_plan_is_dropped_with_a_warning(duo, tmp_path) -> None:
    first, second = duo.run(jobs.resume, folder=str(tmp_path), plan="int8", tail={"plan": "all_reduce"})
    assert len(first["warnings"]) == 1
    assert "plan" in first["warnings"][0]
    assert not second["warnings"]


def test_compressor_state_goes_over_to_another_plan(duo, tmp_path) -> None:
    tail = {"compressor": "int8", "topology": "star", "bucket_bytes": 1}
    for found in duo.run(jobs.resume, folder=str(tmp_path), plan="int8", tail=tail):
        assert not found["warnings"]


def test_error_feedback_follows_the_gradient_scaler(duo) -> None:
    for found in duo.run(jobs.scaled, poisoned=3):
        assert found["distance"] == 0.0
        assert max(found["scales"]) > found["scales"][0] > 0
        assert found["scales"][4] < found["scales"][3]


def test_unfreezing_keeps_what_compressors_remember(duo) -> None:
    first, second = duo.run(jobs.thawed)
    for found in (first, second):
        before, after = found["before"], found["after"]
        assert any(before["head.weight"])
        assert after["head.weight"] == before["head.weight"]
        assert any(before["head.bias"])
        assert "head.bias" not in after
        assert not any(after["body.weight"])
    assert len(first["warnings"]) == 1
    assert "of head.bias is dropped" in first["warnings"][0]
    assert not second["warnings"]


def test_pytorch_lightning_equals_its_own_ddp(duo) -> None:
    pytest.importorskip("pytorch_lightning")
    assert max(duo.run(jobs.other_framework)) < 1e-6
