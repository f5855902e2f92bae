"""A rank meets a fault while its job tunes itself: nobody hangs, weights are right, and the rank is named."""

from __future__ import annotations

import pytest
from soak import Fault, Seen, Soak
from soak_calls import DELAY, EXCEPTION, KILL, STOP, TUNING
from tuning_soak_calls import AGAIN, END, NO_CONNECTION, OPENING, OTHER_PLAN, PASS, SURVEY

pytestmark = pytest.mark.slow  # whole jobs, with an undisturbed one of each size beside them
GOES_ON = {DELAY, NO_CONNECTION}
FAULTS = [
    (KILL, OPENING, 1),
    (NO_CONNECTION, OPENING, 1),
    (KILL, SURVEY, 1),
    (KILL, AGAIN, 1),
    (OTHER_PLAN, PASS, 8),
    (STOP, SURVEY, 2),
    (EXCEPTION, SURVEY, 1),
    (DELAY, SURVEY, 1),
    (STOP, OPENING, 2),
    (EXCEPTION, OPENING, 1),
    (DELAY, OPENING, 1),
    (NO_CONNECTION, OPENING, 2),
    (KILL, PASS, 9),
    (STOP, PASS, 12),
    (EXCEPTION, PASS, 10),
    (KILL, END, 1),
    (EXCEPTION, END, 1),
    (DELAY, AGAIN, 1),
    (STOP, AGAIN, 1),
]


@pytest.fixture(scope="module")
def soak() -> Soak:
    return Soak()


def meet(soak: Soak, kind: str, moment: str, count: int, size: int, victim: int) -> Seen:
    fault = Fault(0, kind, TUNING, size, victim, 0, after=0.001, seconds=0.5, seed=1, moment=moment, count=count)
    return soak.run(fault)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "moment", "count"), FAULTS)
def test_a_fault_around_a_switch_hangs_nobody_and_is_named(
    soak: Soak, kind: str, moment: str, count: int, size: int
) -> None:
    seen = meet(soak, kind, moment, count, size, victim=1)
    assert seen.struck
    assert not seen.bad, seen
    assert not seen.another, seen
    assert seen.ok == (kind in GOES_ON), seen


@pytest.mark.parametrize("kind", [KILL, STOP, EXCEPTION, NO_CONNECTION])
def test_so_does_one_of_the_first_rank(soak: Soak, kind: str) -> None:
    seen = meet(soak, kind, OPENING, 1, size=3, victim=0)
    assert seen.struck
    assert not seen.bad, seen
    assert seen.ok == (kind in GOES_ON), seen
