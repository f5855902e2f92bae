"""Live ranks in which Trainers are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_pool import SharedPool

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def pair() -> Iterator[SharedPool]:
    with SharedPool(2, [TESTS], timeout=150.0) as shared:
        yield shared
