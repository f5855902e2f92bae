"""Ranks that do unlike things between split layers compute what DDP does, or are told."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid import unlike

NUMBER = "the last pass combined split values with a Python number that differs between rank 1 and rank 0"


@pytest.mark.parametrize(
    "between", ["count", "mask", "own mask", "running buffer", "sometimes changed", "part of a buffer"]
)
def test_operands_of_own_samples(pool: Any, between: str) -> None:
    assert max(pool.run(unlike.distance, between=between)) < 1e-12


def test_copies_that_are_not_reduced_are_compared(pool: Any) -> None:
    for found in pool.run(unlike.changed_copy)[:2]:
        assert found.startswith("ExchangeError: replicas differ: the weights of 'down.bias' on rank 1")


@pytest.mark.parametrize("between", ["own backward", "hook"])
def test_gradients_that_code_between_layers_changes(pool: Any, between: str) -> None:
    assert max(pool.run(unlike.distance, between=between)) < 1e-12


def test_gradients_that_are_retained_or_asked_for(pool: Any) -> None:
    assert max(pool.run(unlike.gradients_of_a_value)) < 1e-12


@pytest.mark.parametrize(
    ("between", "told"),
    [
        *((name, NUMBER) for name in ("number", "NumPy's number", "index", "slice", "sizes", "scale")),
        ("input without samples", "in the last pass split layer 'common' got another input on rank 1 than on rank 0"),
        ("index without samples", "in the last pass split layer 'table' got another input on rank 1 than on rank 0"),
        ("layer", "the last pass called different split layers, or used different shapes, on rank 1 than on rank 0"),
    ],
)
def test_a_pass_that_differs_is_found_before_the_next(pool: Any, between: str, told: str) -> None:
    assert set(pool.run(unlike.second_pass, between=between, alike=True)) == {""}
    for found in pool.run(unlike.second_pass, between=between, alike=False)[:2]:
        assert found.startswith(f"ExchangeError: {told}")


def test_a_buffer_that_only_some_ranks_change_late_is_found_before_the_next_pass(pool: Any) -> None:
    for found in pool.run(unlike.late_change)[:2]:
        assert found.startswith("2: the last pass changed a buffer on rank 1 in another way than on rank 0")
