"""The check before training accepts right rewrites and refuses wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
from sweeps import sweep

from hybrid import calls
from hybrid.faults import FAULTS


@pytest.mark.parametrize("model", ["dropping", "language"])
def test_right_rewrites_are_accepted(pool: Any, model: str) -> None:
    assert set(pool.run(calls.check, model=model)) == {""}


@pytest.mark.parametrize("fault", sweep(FAULTS, [*FAULTS][::9]))
def test_wrong_rewrites_are_refused(pool: Any, fault: str) -> None:
    told = pool.run(calls.check, model=FAULTS[fault][0], fault=fault)[:4]
    assert len(set(told)) == 1, "every rank is told the same"
    assert "unsplit" in told[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no loss", "failed on rank 1: training_step returned NoneType"),
        ("error", "failed on rank 1: ValueError: a sample of rank 1 is damaged"),
        ("optimizer", "failed on rank 1: TypeError: a closure is missing"),
        ("shape", "failed on rank 0, 1, 2, 3: RuntimeError: shape"),
    ],
)
def test_ranks_fail_together(pool: Any, case: str, words: str) -> None:
    found = pool.run(calls.check_failing, case=case)[:4]
    told = {theirs["told"] for theirs in found}
    assert len(told) == 1, "no rank goes on alone"
    (line,) = told
    assert line.startswith("EquivalenceError: the training step that compares")
    assert words in line
    if case != "shape":
        assert not any(theirs["changed"] for theirs in found), "the optimizer's step is undone"


def test_an_optimizer_from_before_the_split_is_refused(pool: Any) -> None:
    (told,) = set(pool.run(calls.check_kept)[:4])
    assert told.startswith("EquivalenceError: the optimizer has state for the whole of parameter 'embed.weight'")


@pytest.mark.parametrize("dtype", sweep(["float32", "float64"], ["float64"]))
def test_weights_of_several_dtypes(pool: Any, dtype: str) -> None:
    assert set(pool.run(calls.check_dtypes, dtype=dtype)) == {""}


def test_integers_that_differ_are_refused(pool: Any) -> None:
    told = pool.run(calls.check_dtypes, dtype="float64", odd=2)[:4]
    assert all("the weights of 'table' on rank 2 differ from those on rank 0" in theirs for theirs in told)


def test_complex_parameters_that_train_are_refused(pool: Any) -> None:
    told = pool.run(calls.check_dtypes, dtype="float64", trains=True)[:4]
    assert all(theirs.startswith("PlanError: plan: parameter 'phase' is complex") for theirs in told)
