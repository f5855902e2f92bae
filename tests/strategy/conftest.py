"""Two live ranks in which Trainers and Fabrics are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_pool import SharedPool


@pytest.fixture(scope="session")
def duo() -> Iterator[SharedPool]:
    with SharedPool(2, [Path(__file__).parent], timeout=120.0) as shared:
        yield shared
