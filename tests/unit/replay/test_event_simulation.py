"""When frames leave a connection: in the bursts of its pace, and in the order in which the kernel takes them over."""

from __future__ import annotations

import numpy
import pytest

from lightning_autosync.replay.event_simulation import Dependencies, FrameConnections, Nodes, simulate
from lightning_autosync.replay.network import Routes
from lightning_autosync.replay.windows import Windows

RATE = 10e6
"""Bytes/s of the only link."""


def sent(
    sizes: list[float],
    releases: list[float],
    keys: list[float],
    pace: float = numpy.inf,
    burst: float = numpy.inf,
    unsent: float = 65536.0,
    round_trip: float = 0.0,
    windows: Windows | None = None,
) -> list[float]:
    """Seconds at which the last byte of each frame leaves the connection from rank 0 to rank 1."""
    count = len(sizes)
    none = numpy.zeros(count)
    nodes = Nodes(
        numpy.repeat([-1, 0], count),
        numpy.array([*none, *sizes]),
        numpy.array([*none, *keys]),
        numpy.zeros(2 * count),
        numpy.zeros(2 * count),
        numpy.array([*releases, *none]),
    )
    empty = numpy.zeros(0, dtype=numpy.int64)
    # Frame k waits for point k, which is reached at its release.
    waits = numpy.repeat([0, 1], count)
    graph = Dependencies(
        waits, numpy.minimum(numpy.arange(2 * count + 1), count), count + numpy.arange(count), empty, empty, 2
    )
    routes = Routes(
        numpy.zeros((2, 2), dtype=numpy.int32),
        numpy.array([0, 1], dtype=numpy.int32),
        numpy.zeros(1, dtype=numpy.int32),
        numpy.zeros(1),
    )
    one = numpy.zeros(1, dtype=numpy.int64)
    pace_, burst_, unsent_, round_trip_ = (numpy.array([value]) for value in (pace, burst, unsent, round_trip))
    connections = FrameConnections(one, one + 1, one, pace_, burst_, routes, unsent_, round_trip_, 1, -1)
    capacities = numpy.array([RATE, 1.0, 1.0])
    windows = Windows.new(1) if windows is None else windows
    _, left, _ = simulate(nodes, graph, connections, windows, capacities, numpy.zeros(3), numpy.zeros(3))
    return list(left[count:])


def test_a_paced_connection_sends_a_frame_at_once_and_then_waits() -> None:
    # It was idle before, so the first wait is half as long.
    left = sent([10e3] * 3, [0.1] * 3, [0.0] * 3, pace=1e6, burst=15e3)
    assert left == pytest.approx([0.101, 0.106, 0.116])


def test_a_frame_larger_than_a_burst_leaves_in_several() -> None:
    # Bursts begin after 0, 10 and 20 ms; the last one has 5 kB, so the next frame begins 5 ms later.
    left = sent([25e3, 10e3], [0.0, 0.0], [0.0, 0.0], pace=1e6, burst=10e3)
    assert left == pytest.approx([0.0205, 0.026])


@pytest.mark.parametrize("size", [131072 * 1514 / 1448, 100e3, 123456.789, 1e6 / 3])
def test_a_large_frame_leaves_in_sixteen_bursts(size: float) -> None:
    # Each burst waits for the pace, and the last one takes its time on the link.
    (left,) = sent([size], [0.0], [0.0], pace=1e6, burst=1e3)
    assert left == pytest.approx(15 / 16 * size / 1e6 + size / 16 / RATE, rel=1e-6)


def test_a_connection_without_a_pace_never_waits() -> None:
    assert sent([10e3] * 3, [0.0] * 3, [0.0] * 3) == pytest.approx([0.001, 0.002, 0.003])


@pytest.mark.parametrize(("unsent", "ahead"), [(20e3, 2), (65536.0, 3), (90e3, 4)])
def test_an_urgent_frame_waits_behind_what_the_kernel_has_taken_over(unsent: float, ahead: int) -> None:
    # While the first frame of 40 kB leaves, the kernel takes over others until it has ``unsent`` bytes.
    left = sent([40e3] * 6, [0.0] * 5 + [1e-3], [1.0] * 5 + [0.0], unsent=unsent)
    assert left[5] == pytest.approx(0.004 * (ahead + 1))


def test_the_kernel_takes_over_more_as_bursts_leave() -> None:
    # With 40 kB left of the first frame, after 6 of its 10 bursts, there is room for the second one.
    left = sent([100e3, 10e3, 10e3], [0.0, 0.0, 0.055], [1.0, 1.0, 0.0], pace=RATE, burst=10e3, unsent=40.1e3)
    assert left[1] < left[2]
    left = sent([100e3, 10e3, 10e3], [0.0, 0.0, 0.003], [1.0, 1.0, 0.0], pace=RATE, burst=10e3, unsent=40.1e3)
    assert left[2] < left[1]
