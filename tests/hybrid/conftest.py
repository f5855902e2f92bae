"""Live ranks in which Trainers are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_autosync.measure.workers import WorkerPool

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout=150.0, extra_paths=[TESTS], scheduling="batch") as workers:
        yield workers


@pytest.fixture(scope="session")
def quartet() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout=280.0, extra_paths=[TESTS], scheduling="batch") as workers:
        yield workers
