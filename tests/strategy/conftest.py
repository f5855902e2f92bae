"""Two live ranks in which Trainers and Fabrics are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_autosync.measure.workers import WorkerPool


@pytest.fixture(scope="session")
def duo() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout=120.0, extra_paths=[Path(__file__).parent], scheduling="batch") as workers:
        yield workers
