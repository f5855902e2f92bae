"""Fixtures of tests of the engine's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from overlapping import Job


@pytest.fixture
def job() -> Iterator[Job]:
    """A job of one rank whose steps overlap."""
    made = Job()
    yield made
    made.overlap.close()
