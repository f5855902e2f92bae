"""Sums in memory that the ranks of one machine share."""

from __future__ import annotations

import math

import pytest
import shared_calls
from sweeps import crossed


@pytest.mark.parametrize(("dtype", "bucket_bytes"), crossed(["float64", "float32", "float16", "bfloat16"], [1, 2**20]))
def test_every_element_is_the_mean_on_all_ranks(pool, dtype: str, bucket_bytes: int) -> None:
    values = [4.0, 8.0, -2.0, 6.0]
    for found in pool.run(shared_calls.summed, dtype=dtype, values=values, bucket_bytes=bucket_bytes)[:4]:
        assert found["unique"] == [4.0]
        assert found["equal"]
        assert found["messages"] == (4 if bucket_bytes == 1 else 1)


def test_what_is_not_a_number_reaches_all_ranks(pool) -> None:
    for found in pool.run(shared_calls.summed, dtype="float32", values=[1.0, math.nan, 2.0])[:3]:
        assert all(math.isnan(value) for value in found["unique"])
        assert found["equal"]


def test_sums_are_the_same_bits_on_all_ranks(pool) -> None:
    # In single precision the order of these summands shows.
    for found in pool.run(shared_calls.summed, dtype="float32", values=[1e8, 1.0, -1e8, 0.1, 3.3]):
        assert found["equal"]
        assert len(found["unique"]) == 1


def test_a_world_of_one(pool) -> None:
    assert pool.run(shared_calls.summed, dtype="float32", values=[3.0])[0]["unique"] == [3.0]


def test_engines_side_by_side(pool) -> None:
    for gaps in pool.run(shared_calls.side_by_side, engines=3):
        assert gaps == [0.0] * 3


@pytest.mark.slow
def test_engine_after_engine(pool) -> None:
    for kept, descriptors in pool.run(shared_calls.rebuilt, trials=6):
        assert kept == [True] * 6
        assert descriptors == 0


@pytest.mark.slow
def test_more_messages_than_a_socket_holds_unread(pool) -> None:
    assert pool.run(shared_calls.many_messages, engine_steps=3) == [3] * pool.world_size


def test_nothing_has_a_name(pool) -> None:
    assert pool.run(shared_calls.traces) == [[]] * pool.world_size


@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        ("limit", 2, "PlanError: schedule: topology 'shared_memory': rank 2: "),
        ("elsewhere", 1, "PlanError: schedule: topology 'shared_memory': rank 1 is on another machine or in"),
        ("full", 0, "OpeningError: rank 0: cannot allocate "),
        ("alone", 1, "OpeningError: rank 1: the network is down"),
    ],
)
def test_ranks_that_cannot_share_memory_say_so_together(pool, how: str, rank: int, words: str) -> None:
    for error in pool.run(shared_calls.refused, how=how, rank=rank):
        assert error.startswith(words)


def test_the_reason_is_the_same_on_all_ranks(pool) -> None:
    for free, cramped in pool.run(shared_calls.fault, size=2**20, cramped=3):
        assert free == ""
        assert cramped == "rank 3: 1048576 bytes are needed, but the limit of file sizes is 4096 (ulimit -f)"
