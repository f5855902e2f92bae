"""The least step time with overlap, by hand: two nodes that synchronize one megabyte a second."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec, least_step_time, synchronization_time
from lightning_autosync.errors import ClusterError

MB = 1e6
PAIR = ClusterSpec.uniform(nodes=2, bandwidth=MB)


@pytest.mark.parametrize(
    ("gradients", "times", "expected"),
    [
        ([(0.0, 2 * MB)], {}, 2.0),
        ([(0.5, MB), (1.0, MB)], {"backward": 1.0}, 2.5),  # the wire is busy from 0.5 on
        ([(0.5, 0.25 * MB), (1.0, MB)], {"backward": 1.0}, 2.0),  # it waits for the second gradient
        ([(0.5, 0.25 * MB), (0.6, 0.25 * MB)], {"backward": 3.0}, 3.0),  # backward hides everything
        ([(0.5, MB), (1.0, MB)], {"forward": 1.0, "backward": 1.0, "optimizer": 0.5}, 4.0),
        ([(0.5, MB)], {"backward": 0.5, "framing": 1.5}, 2.0),
        ([(0.5, MB)], {"backward": 0.5, "burst": 0.25 * MB}, 1.25),
        ([(0.5, MB), (1.0, MB)], {"backward": 1.0, "burst": 0.25 * MB}, 2.25),
        ([(0.5, MB)], {"backward": 0.5, "framing": 1.5, "burst": 0.25 * MB}, 1.75),  # a burst counts framing, too
        ([(0.5, MB)], {"backward": 1.0, "burst": 2 * MB}, 1.0),
    ],
)
def test_by_hand(gradients: list[tuple[float, float]], times: dict[str, float], expected: float) -> None:
    assert least_step_time(PAIR, gradients, **times) == pytest.approx(expected)


def test_gradients_ready_at_once_take_the_time_of_a_synchronization() -> None:
    spec = ClusterSpec.star([4 * MB, MB, MB, MB])
    assert least_step_time(spec, [(0.0, MB), (0.0, 3 * MB)]) == pytest.approx(synchronization_time(spec, 4 * MB))


def test_the_fastest_node_may_send_first_and_the_slowest_ends_last() -> None:
    data = PAIR.to_dict()
    data["nodes"][1]["speed"] = 0.5
    spec = ClusterSpec.from_dict(data)
    assert least_step_time(spec, [(1.0, 2 * MB)], backward=1.0) == pytest.approx(3.0)
    assert least_step_time(spec, [(1.0, 0.5 * MB)], backward=1.0, optimizer=0.5) == pytest.approx(3.0)
    # The last bytes may come to the fast node, whose optimizer takes half as long.
    assert least_step_time(spec, [(1.0, 2 * MB)], backward=1.0, optimizer=0.5) == pytest.approx(3.5)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ClusterError, match="must be 0 or more"):
        least_step_time(PAIR, [(-1.0, MB)])
    with pytest.raises(ClusterError, match="burst: each must be 0 or more"):
        least_step_time(PAIR, [(0.0, MB)], burst=-1.0)
    with pytest.raises(ClusterError, match="framing"):
        least_step_time(PAIR, [(0.0, MB)], framing=0.5)
