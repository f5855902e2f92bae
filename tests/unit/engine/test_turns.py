"""Which waits of ranks for each other are found, and which may still end."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_autosync.engine import turns
from lightning_autosync.engine.turns import Turns, crossed

ONE, TWO, BUFFERS = "pass of module 1", "pass of module 2", "buffers of module 2"


def waiting(begun: list[str], name: str, source: int | None = None) -> dict[str, Any]:
    """What a rank tells that has begun these exchanges and waits for one of them."""
    own = Turns()
    for each in begun:
        own.begin(each)
    own.wait(name, source)
    with mock.patch.object(turns, "PATIENCE", 0.0):
        told = own.overdue()
        assert own.overdue() is None
    assert told is not None
    return told


@pytest.mark.parametrize("source", [None, 0])
def test_ranks_that_wait_for_what_the_other_has_not_begun_are_named(source: int | None) -> None:
    first = waiting([ONE, TWO, ONE], ONE)
    second = waiting([ONE, TWO, TWO], TWO, source)
    told = crossed({0: first, 2: second})
    assert told.startswith(f"ranks 0 and 2 wait for each other: rank 0 in the {ONE}, and rank 2 in the {TWO}. Run")


@pytest.mark.parametrize(
    "second",
    [
        waiting([ONE, TWO, ONE, TWO], TWO),  # it has done its part of what the first one waits for
        waiting([ONE, TWO, BUFFERS], BUFFERS, 1),  # it waits for another rank, which may come
        waiting([ONE, TWO], TWO),  # the first one has begun that too: the data is under way
    ],
)
def test_waits_that_may_end_are_left_alone(second: dict[str, Any]) -> None:
    assert crossed({0: waiting([ONE, TWO, ONE], ONE), 2: second}) == ""


def test_a_short_wait_is_not_told() -> None:
    own = Turns()
    assert own.overdue() is None
    own.begin(ONE)
    own.wait(ONE)
    assert own.overdue() is None
