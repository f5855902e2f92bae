"""What is raised of what ranks answer."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.workers.calls import describe, wrong_input


def described(error: Exception) -> dict[str, Any]:
    try:
        raise error
    except Exception as caught:
        return describe(caught)


REFUSED, BROKEN = described(DocumentError("data.csv: missing")), described(ValueError("no"))


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ({1: REFUSED, 0: REFUSED}, "data.csv: missing"),
        ({1: REFUSED}, "rank 1: data.csv: missing"),
        ({1: REFUSED, 0: described(DocumentError("model: missing"))}, "model: missing; data.csv: missing"),
    ],
)
def test_ranks_are_named_where_others_had_nothing_to_say(errors: dict[int, dict[str, Any]], message: str) -> None:
    found = wrong_input(errors, range(2))
    assert found is not None
    assert (str(found), found.rank, found.kind) == (message, min(errors), "DocumentError")
    assert "DocumentError" in found.traceback


def test_what_is_no_input_is_told_in_full() -> None:
    assert wrong_input({0: REFUSED, 1: BROKEN}, range(2)) is None
    assert (BROKEN["type"], BROKEN["message"]) == ("ValueError", "no")
