"""Split models train to the weights of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sweeps import sweep

from hybrid import calls
from hybrid.models import MODELS
from lightning_autosync.measure.workers import WorkerPool

EQUAL = 1e-6
TOLD = [name for name in MODELS if "dropout" not in name and name != "dropping"]


def _check(pool: Any, model: str, meshes: list[list[int]], seeds: list[int], **options: Any) -> None:
    found = pool.run(calls.equal_after_training, model=model, meshes=meshes, seeds=seeds, **options)
    far = {case: distance for theirs in found for case, distance in theirs.items() if not distance < EQUAL}
    assert not far


@pytest.mark.parametrize("model", sweep(TOLD, ["language"]))
def test_random_plans(pool: Any, model: str) -> None:
    _check(pool, model, [[2], [2, 2]], [0])


def test_sgd(pool: Any) -> None:
    _check(pool, "mlp", [[4]], [1], optimizer="sgd")


def test_blocks_that_run_again_drop_the_same(pool: Any) -> None:
    assert max(pool.run(calls.with_checkpointing, model="dropping")) < 1e-12


@pytest.mark.parametrize("model", ["dropping", "language"])
def test_inference_mode(pool: Any, model: str) -> None:
    assert max(pool.run(calls.in_inference_mode, model=model)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("model", TOLD)
def test_many_random_plans(pool: Any, model: str) -> None:
    _check(pool, model, [[2], [4], [2, 2]], [1, 2, 3])


@pytest.fixture(scope="module")
def octet() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout=280.0, extra_paths=["tests"], scheduling="batch") as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("model", TOLD)
def test_three_dimensions(octet: WorkerPool, model: str) -> None:
    _check(octet, model, [[2, 2, 2]], [0, 1, 2])
