"""What TCP's congestion windows cost on links of many milliseconds."""

from __future__ import annotations

from typing import Any

import pytest
from replay_cases import IDEAL, price, schedule, tree, workload
from test_event_simulation import RATE, sent

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.replay import Replay
from lightning_autosync.replay.windows import Windows

ROUND_TRIP = 0.04
FIRST = 10 * 1514
"""Bytes on the wire of a new connection's window."""
RESTARTING = IDEAL.model_copy(update={"restarts": True})


def test_a_new_connection_sends_twice_as_much_in_each_round_trip() -> None:
    (left,) = sent([200e3], [0.0], [0.0], round_trip=ROUND_TRIP)
    assert left == pytest.approx(3 * ROUND_TRIP + (200e3 - 7 * FIRST) / RATE)


LAST = 200e3 - 7 * FIRST
"""Bytes of 200 kB that a new connection sends after three round trips. Its window then grows to twice as much."""


@pytest.mark.parametrize(
    ("pause", "round_trips", "before"),
    [(0.2, 0, 0), (0.3, 1, LAST), (0.5, 1, LAST / 2), (5.0, 2, 3 * FIRST)],
    ids=["shorter than a timeout", "longer than one", "longer than two", "many"],
)
def test_the_window_is_halved_for_each_timeout_of_a_pause(pause: float, round_trips: int, before: float) -> None:
    """``before`` is what leaves before the last of so many round trips."""
    start = 3 * ROUND_TRIP + LAST / RATE + pause
    left = sent([200e3, 100e3], [0.0, start], [0.0, 0.0], round_trip=ROUND_TRIP)
    assert left[1] == pytest.approx(start + round_trips * ROUND_TRIP + (100e3 - before) / RATE)


def test_a_window_that_a_step_has_used_up_waits_for_acknowledgements_in_the_next_one() -> None:
    windows = Windows.new(1)
    sent([FIRST], [0.0], [0.0], round_trip=ROUND_TRIP, windows=windows)
    windows.pass_by(0.01)
    left = sent([FIRST], [0.0], [0.0], round_trip=ROUND_TRIP, windows=windows)
    assert left == pytest.approx([0.03 + FIRST / RATE])


def test_frames_share_the_window_of_their_connection() -> None:
    left = sent([FIRST / 2] * 4, [0.0] * 4, [0.0] * 4, round_trip=ROUND_TRIP)
    assert left == pytest.approx(
        [each * FIRST / 2 / RATE for each in (1, 2)] + [0.04 + each * FIRST / 2 / RATE for each in (1, 2)]
    )


def far(one_way: float) -> ClusterSpec:
    return ClusterSpec.uniform(nodes=2, bandwidth=1e8, latency=one_way / 2)


def step_time(one_way: float, computation: float, constants: Any = RESTARTING, detail: Any = "frames") -> float:
    work = workload(1, forward_time=computation / 2, backward_time=computation / 2)
    return price(far(one_way), [tree([-1, 0])], detail, work, constants).step_time


def test_steps_with_a_long_computation_wait_for_windows() -> None:
    """The first tenth of a megabyte goes up in three round trips, then all comes down in seven; the last are short."""
    last = (0.1e6 - 3 * FIRST + 1e6 - 63 * FIRST) / 1e8
    assert step_time(0.02, 5.0) == pytest.approx(5.0 + (2 + 6) * ROUND_TRIP + 2 * 0.02 + last, abs=1e-6)


def test_windows_stay_large_where_a_step_has_no_long_pause() -> None:
    """Prediction is for steps that find the windows of those before."""
    assert step_time(0.02, 0.01) == pytest.approx(step_time(0.02, 0.01, IDEAL), rel=0.01)


def test_windows_do_not_matter_on_short_ways_nor_to_fluids() -> None:
    assert step_time(1e-4, 5.0) == step_time(1e-4, 5.0, IDEAL)
    assert step_time(0.02, 5.0, detail="fluid") == step_time(0.02, 5.0, IDEAL, detail="fluid")


def test_predictions_do_not_depend_on_those_before() -> None:
    replay, made = Replay(workload(1, forward_time=1.0), far(0.02), RESTARTING), schedule(2, [tree([-1, 0])])
    assert replay.predict(made).step_time == replay.predict(made).step_time
