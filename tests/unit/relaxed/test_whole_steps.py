"""Progress is a sum of fractions of steps, whatever the rounding."""

from __future__ import annotations

import itertools

import pytest

from lightning_autosync.relaxed.server.rpc import whole_steps


@pytest.mark.parametrize("parties", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_rounding_loses_no_step(parties: int) -> None:
    sums = itertools.accumulate(itertools.repeat(1.0 / parties, 400_000 * parties))
    assert all(whole_steps(total) == (place + 1) // parties for place, total in enumerate(sums))


def test_a_part_of_a_step_is_none() -> None:
    assert whole_steps(7 - 1 / 1000) == 6
