"""Weights of a group's members: sums, order, and the published rule where it is in order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.relaxed.grouping import constant_weights, dynamic_weights, sample_weights

ITERATIONS = st.lists(st.integers(0, 400), min_size=1, max_size=12)


@given(iterations=ITERATIONS, decay=st.floats(0.05, 0.99))
def test_dynamic_weights_sum_to_one_and_never_grow_with_age(iterations: list[int], decay: float) -> None:
    weights = dynamic_weights(iterations, decay)
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    assert all(weight >= 0 for weight in weights)
    by_age = sorted(zip(iterations, weights, strict=True), reverse=True)
    for (newer, heavy), (older, light) in itertools.pairwise(by_age):
        assert light == heavy if newer == older else light <= heavy + 1e-15


@given(lag=st.integers(0, 300), more=st.integers(1, 30))
def test_in_a_pair_falling_further_behind_costs_weight(lag: int, more: int) -> None:
    assert dynamic_weights([400, 400 - lag - more])[1] < dynamic_weights([400, 400 - lag])[1] + 1e-15


@given(shift=st.integers(0, 1000), iterations=ITERATIONS)
def test_only_differences_count(shift: int, iterations: list[int]) -> None:
    assert dynamic_weights([k + shift for k in iterations]) == dynamic_weights(iterations)


def test_ages_in_order_follow_the_moving_average() -> None:
    # One member an age: masses 0.1, 0.09, 0.081 over 1 - 0.9 ** 3.
    assert dynamic_weights([5, 4, 3]) == pytest.approx([0.1 / 0.271, 0.09 / 0.271, 0.081 / 0.271])
    # Nobody is two iterations behind: that mass goes to the newest.
    assert dynamic_weights([5, 3]) == pytest.approx([0.19 / 0.271, 0.081 / 0.271])


def test_a_lone_stale_member_does_not_outweigh_fresh_ones() -> None:
    # Left as published, 0.263, 0.263, 0.474.
    assert dynamic_weights([8, 8, 7]) == pytest.approx([1 / 3] * 3)


def test_equal_iterations_are_constant_weights() -> None:
    assert dynamic_weights([7] * 4) == constant_weights(4) == [0.25] * 4


def test_samples_count_in_proportion() -> None:
    assert sample_weights([30, 10, 0]) == [0.75, 0.25, 0.0]
    assert sample_weights([0, 0]) == [0.5, 0.5]
