"""Steps that overlap with the next forward pass end, bit by bit, where steps that wait end."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import forked
import numpy as np
import overlap_jobs
import pytest
from sweeps import sweep

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.errors import DocumentError

PAIR = {"format": "autosync-cluster/1", "name": "pair", "uniform": {"nodes": 2, "bandwidth": "1 Gbit/s"}}
TREES = {"plan": "packed_trees", "cluster": PAIR}
SMALL = {"bucket_cap_mb": 1e-4}
FINE = {**TREES, "bucket_cap_mb": 5e-5}

OVERLAPS: dict[str, dict[str, Any]] = {
    "trees": {"model": "Plain", "strategy": TREES},
    "native": {"model": "Plain", "strategy": {"plan": "all_reduce", **SMALL}},
    "parameter servers": {"model": "Unused", "strategy": {"plan": "ps_load_balancing"}},
    "views": {"model": "Plain", "strategy": {**SMALL, "gradient_as_bucket_view": True}},
    "accumulation of 2": {"model": "Plain", "accumulate_grad_batches": 2, "strategy": SMALL},
    "accumulation of 4": {"model": "Plain", "accumulate_grad_batches": 4, "strategy": SMALL},
    "clipping by value": {
        "model": "Plain",
        "strategy": SMALL,
        "gradient_clip_val": 0.02,
        "gradient_clip_algorithm": "value",
    },
    "bf16-mixed": {"model": "Plain", "precision": "bf16-mixed", "strategy": SMALL},
    "bf16-true": {"model": "Plain", "precision": "bf16-true", "strategy": SMALL},
    "unused": {"model": "Unused", "accumulate_grad_batches": 2, "strategy": SMALL},
    "frozen": {"model": "Frozen"},
    "tied": {"model": "Tied", "strategy": SMALL},
    "buffers": {"model": "Normalized", "strategy": SMALL},
    "activation checkpoints": {"model": "Checkpointed", "strategy": SMALL},
    "reentrant activation checkpoints": {"model": "Reentrant", "strategy": SMALL},
    "two optimizers": {"model": "Untoggled", "strategy": SMALL},
    "sparse embedding": {"model": "SparseTable"},
    "large embedding": {"model": "DenseTable"},
    "thawing": {"model": "Thaws", "strategy": SMALL},
    # The failures of Megatron-LM's --overlap-param-gather, in `events` and `second_model` too.
    "losses": {"model": "Sees", "strategy": TREES},
    "another order": {"model": "Reversed", "strategy": SMALL},
    "weights read outside of their module": {"model": "ReadOutside", "strategy": SMALL},
    "a layer that is skipped": {"model": "Skips", "strategy": {**SMALL, "gradient_as_bucket_view": True}},
    "settled at odd times": {"model": "Settles", "strategy": SMALL},
    "torch.func": {"model": "Functional", "strategy": SMALL},
    "functional_call": {"model": "FunctionalCall", "strategy": SMALL},
    "weights of modules that are never called": {"model": "NeverCalled", "strategy": SMALL},
    "compiled loss": {"model": "CompiledLoss", "strategy": SMALL},
    "manual optimization": {"model": "ByHand", "strategy": SMALL},
    "gradient scaler": {"model": "Scaled", "half": True, "strategy": FINE},
    "gradient scaler, accumulation": {
        "model": "Scaled",
        "half": True,
        "accumulate_grad_batches": 2,
        "strategy": FINE,
    },
    "gradient scaler, clipping by value": {
        "model": "Scaled",
        "half": True,
        "strategy": FINE,
        "gradient_clip_val": 0.02,
        "gradient_clip_algorithm": "value",
    },
    "gradient scaler, manual optimization": {"model": "ByHand", "half": True, "strategy": FINE},
    "gradient scaler, mixture": {"model": "Mixture", "half": True, "max_epochs": 1, "strategy": FINE},
}
WAITS: dict[str, dict[str, Any]] = {
    "clipping by norm": {"model": "Plain", "gradient_clip_val": 0.05},
    "gradient scaler": {"model": "Plain", "half": True, "gradient_clip_val": 0.1},
    "gradients seen": {"model": "SeesGradients", "strategy": SMALL},
    "two optimizers, toggled": {"model": "Adversarial", "strategy": SMALL},
    "two optimizers, accumulation": {"model": "Accumulates", "strategy": SMALL},
    "two optimizers, accumulation in place": {"model": "AccumulatesInPlace", "strategy": SMALL},
    "freezing": {"model": "ThawsLate", "strategy": SMALL},
    "compiled part": {"model": "Compiled"},
    "compiled method": {"model": "CompiledMethod", "strategy": SMALL},
    "compiled model": {"model": "compiled_whole", "strategy": SMALL},
    "gradient scaler, native": {"model": "Scaled", "half": True, "strategy": {"plan": "all_reduce", **SMALL}},
    "gradient scaler, gradients seen": {"model": "ScaledAndSeen", "half": True, "strategy": FINE},
    "gradient scaler, gradients seen by one rank": {"model": "ScaledAndSeenEarly", "half": True, "strategy": FINE},
    "gradient scaler, fused optimizer": {"model": "ScaledAndFused", "half": True, "strategy": FINE},
    "gradient scaler, own class": {"model": "ScaledByOwnClass", "half": True, "strategy": FINE},
    "gradient scaler, two optimizers": {"model": "ScaledInParts", "half": True, "strategy": FINE},
    "gradient scaler, called by hand": {"model": "ScaledAndUnscaled", "half": True, "strategy": FINE},
    "scaler with overflows": {"model": "Mixture", "half": True, "max_epochs": 1},
}
QUICK = ("trees", "native", "another order", "clipping by value", "settled at odd times", "clipping by norm")
QUICK += ("gradient scaler", "gradient scaler, fused optimizer", "losses", "a layer that is skipped")
QUICK += ("functional_call", "weights of modules that are never called", "compiled loss", "compiled method")


@pytest.mark.parametrize("case", sweep(OVERLAPS, [case for case in OVERLAPS if case in QUICK]))
def test_equals_waiting(duo, case: str) -> None:
    for different, moved, late in duo.run(overlap_jobs.compare, **OVERLAPS[case]):
        assert different == []
        assert moved
        assert late[0] > 0


CLIPS: dict[str, dict[str, Any]] = {
    "trees": {"model": "Plain"},
    "accumulation": {"model": "Plain", "accumulate_grad_batches": 2},
    "bf16": {"model": "Plain", "precision": "bf16-true"},
    "unused": {"model": "Unused"},
    "tied": {"model": "Tied"},
    "parts by hand": {"model": "ClipsParts", "gradient_clip_val": None},
    "gradient scaler": {"model": "Scaled", "half": True},
}


@pytest.mark.parametrize("case", sweep(CLIPS, ["trees", "parts by hand", "gradient scaler"]))
def test_gradients_are_clipped_by_norm_before_all_sums_have_come(duo, case: str) -> None:
    found = duo.run(overlap_jobs.clipped, strategy={**TREES, "bucket_cap_mb": 5e-5}, **CLIPS[case])
    assert found[0]["step"][0] == found[1]["step"][0]
    for ranks in found:
        (waits, _), (overlaps, late) = ranks["None"], ranks["step"]
        for name, value in waits.items():
            np.testing.assert_allclose(overlaps[name], value, rtol=1e-5, atol=1e-7 if case != "bf16" else 1e-2)
        assert late[0] > 0


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("model", ["ReadsOnRankZero", "ChangesGradients", "Thaws"])
def test_ranks_clip_when_all_sums_have_come_if_gradients_are_read_or_parameters_change(
    duo, model: str, half: bool
) -> None:
    for found in duo.run(overlap_jobs.clipped, model=model, half=half, strategy={**TREES, **SMALL}):
        assert found["step"][0] == found["None"][0]
        assert found["step"][1][0] == 0


def test_fabric_clips_by_norm_before_all_sums_have_come(duo) -> None:
    found = duo.run(overlap_jobs.clipped_by_fabric, strategy={**TREES, **SMALL})
    assert found[0]["step"][:2] == found[1]["step"][:2]
    for ranks in found:
        (norms, weights, _), (early_norms, early_weights, late) = ranks["None"], ranks["step"]
        np.testing.assert_allclose(early_norms, norms, rtol=1e-6)
        for one, other in zip(weights, early_weights, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)
        assert late[0] > 0


@pytest.mark.parametrize("clip", [{}, {"clip_val": 0.02}, {"max_norm": 0.5, "error_if_nonfinite": False}])
def test_fabric_unscales_gradients_before_all_sums_have_come(duo, clip: dict[str, float]) -> None:
    found = duo.run(overlap_jobs.scaled_by_fabric, strategy=FINE, clip=clip)
    assert found[0]["step"][:2] == found[1]["step"][:2]
    for ranks in found:
        (scales, weights, waits), (early_scales, early_weights, late) = ranks["None"], ranks["step"]
        assert early_scales == scales
        assert min(scales) < scales[3] < max(scales)
        for one, other in zip(weights, early_weights, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5 if "max_norm" in clip else 0, atol=0)
        assert waits == [0, 0]
        assert late[0] > 0


@pytest.mark.parametrize("case", sweep(OVERLAPS, ["weights read outside of their module"]))
def test_no_operator_uses_memory_whose_step_is_due(duo, case: str) -> None:
    for different, _, late in duo.run(overlap_jobs.compare, debug=True, **OVERLAPS[case]):
        assert different == []
        assert late[0] > 0


@pytest.mark.parametrize("case", sweep(WAITS, [case for case in WAITS if case in QUICK]))
def test_waits_where_gradients_are_read_or_parameters_change(duo, case: str) -> None:
    for different, moved, late in duo.run(overlap_jobs.compare, **WAITS[case]):
        assert different == []
        assert moved
        assert late[0] == 0


@pytest.mark.parametrize(("model", "waits"), [("Scaled", False), ("ScaledInParts", True), ("ScaledAndFused", True)])
def test_the_log_says_where_a_scaler_waits_but_not_that_overflows_do(duo, model: str, waits: bool) -> None:
    told, _ = duo.run(overlap_jobs.told, model=model, half=True, strategy=FINE)
    assert [line for line in told if " needs them " in line and "_unscale_grads_ (grad_scaler.py" not in line] == []
    assert any(" needs them " in line for line in told) == waits


@pytest.mark.parametrize("name", sweep(overlap_jobs.OPTIMIZERS, ["AdamW", "learning rate as a tensor"]))
def test_optimizers_step_parts_as_they_step_all(duo, name: str) -> None:
    for found in duo.run(overlap_jobs.optimizers, names=[name]):
        different, moved, late = found[name]
        assert different == []
        assert moved
        assert late[0] > 0


def test_readers_outside_of_forward_passes_see_current_weights(duo, tmp_path) -> None:
    for rank, found in enumerate(duo.run(overlap_jobs.events, folder=str(tmp_path))):
        for name, (different, moved, late) in found.items():
            assert different == [], (rank, name)
            assert moved, (rank, name)
            assert late[0] > 0, (rank, name)


def test_a_second_model_leaves_the_first_one_alone(duo) -> None:
    for due, completed in duo.run(overlap_jobs.second_model):
        assert due == [0, *[4] * 7]
        assert completed == 0


@pytest.mark.slow
def test_a_compiled_module_equals_waiting(duo) -> None:
    for equal, told in duo.run(overlap_jobs.compiled):
        assert equal
        line = "AutoSync: overlap: steps wait for gradients before each forward pass, because the module is compiled"
        assert told.count(line) == 1


@pytest.mark.parametrize("cleared", sweep(["by optimizers", "by modules", "by hand"], ["by optimizers"]))
def test_fabric_equals_waiting(duo, cleared: str) -> None:
    for found in duo.run(overlap_jobs.fabrics, ways=[cleared]):
        equal, late = found[cleared]
        assert equal
        assert late > 0


@pytest.mark.slow
def test_a_rank_whose_script_ends_first_does_not_fail_the_others(tmp_path) -> None:
    result = tmp_path / "sums.json"
    script = Path(__file__).parent / "overlap_script.py"
    outside = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    command = [sys.executable, str(script), str(result)]
    done = forked.run(command, env={**outside, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(result.read_text())) == 4
    assert "Error" not in done.stderr


@pytest.mark.parametrize("clip", [None, 0.05])
def test_errors_beside_steps_that_are_due_name_their_cause(duo, clip: float | None) -> None:
    other, own = duo.run(overlap_jobs.error_of_rank, victim=1, clip=clip)
    assert own == "ValueError: no such label"
    assert "rank 1" in other
    assert "no such label" in other


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"overlap": "pass"}, "overlap: 'pass' is not known; allowed: 'step' or None"),
        ({"overlap_debug": True}, "overlap_debug: it has no effect without overlap='step'"),
        ({"overlap": "step", "plan": "partial_reduce", "semantics": "relaxed"}, "overlap: it has no effect"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(DocumentError, match=re.escape(reason)):
        AutoSyncStrategy(**arguments)
