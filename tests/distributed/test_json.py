"""Values of all ranks, or of the first one, as JSON."""

from __future__ import annotations

from typing import Any

import json_calls
import pytest

from lightning_autosync.measure.workers import WorkerPool

LARGE = 10_000
"""Characters of a text that does not travel at once."""


@pytest.mark.parametrize("large", [(), (0,), (3,), (0, 4)], ids=str)
def test_all_ranks_get_values_of_any_size(pool: WorkerPool, large: tuple[int, ...]) -> None:
    sizes = [LARGE * (rank in large) + rank for rank in range(pool.world_size)]
    values: list[Any] = [{"rank": rank, "text": "ü" * size} for rank, size in enumerate(sizes)]
    assert pool.run(json_calls.exchange, sizes=sizes) == [[values, values[0]]] * pool.world_size


def test_a_group_that_the_first_rank_is_not_in(pool: WorkerPool) -> None:
    ranks = list(range(2, pool.world_size))
    assert pool.run(json_calls.exchange_in_group, first=2) == [None, None, *[[ranks, 2]] * len(ranks)]


@pytest.mark.parametrize(("size", "expected"), [(100, [1, 1]), (LARGE, [2, 3])], ids=["small", "large"])
def test_few_collectives_so_that_distant_hosts_wait_for_few_latencies(
    pool: WorkerPool, size: int, expected: list[int]
) -> None:
    assert pool.run(json_calls.count_collectives, size=size) == [expected] * pool.world_size
