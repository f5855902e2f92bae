"""gloo's notices wait behind data in the queues of shaped links."""

from __future__ import annotations

import math

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.network import NetworkArrays
from lightning_autosync.replay.notices import notice_queues
from lightning_autosync.replay.stages import BACKWARDS
from lightning_autosync.workload import Variable, Workload

MBIT = 1e6 / 8
BURST = 128 * 1024
FAT = ClusterSpec.star([400 * MBIT, 100 * MBIT, 100 * MBIT, 100 * MBIT])
RACKS = ClusterSpec.racks(racks=2, nodes_per_rack=2, bandwidth=400 * MBIT, uplink=100 * MBIT)
NODES = ClusterSpec.uniform(nodes=2, devices=2, bandwidth=100 * MBIT)


def senders(cluster: ClusterSpec, piece: float, burst: float = BURST) -> list[set[int]]:
    """For each rank, the ranks behind whose data the notice waits that lets it send ``piece`` bytes to the last one."""
    queues = notice_queues(NetworkArrays(cluster, Constants(burst=burst)), BACKWARDS)
    return [{queue.sender for queue in of_rank if piece <= queue.max_piece} for of_rank in queues]


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        # Rank 0 sends to rank 3 faster than rank 3 receives. Rank 2's notice to rank 3 comes through the same port.
        (FAT, [set(), set(), set(), {0}]),
        # Data of ranks 0 and 2 stands before the uplinks; the notices to ranks 2 and 0 cross these.
        (RACKS, [{2}, set(), {0}, set()]),
        # The uplink of a node is the ranks' own port: long pieces are not in its queue.
        (NODES, [set(), set(), set(), set()]),
    ],
)
def test_notices_wait_where_data_of_a_faster_sender_stands(cluster: ClusterSpec, expected: list[set[int]]) -> None:
    assert senders(cluster, 1e6) == expected


def test_notices_wait_behind_short_pieces_of_their_own_rank() -> None:
    equal = ClusterSpec.uniform(nodes=4, bandwidth=100 * MBIT)
    # The notice to rank 1 comes from rank 0, whose port holds its own data for rank 3; and so on.
    assert senders(equal, 0.003 * 100 * MBIT) == [{3}, {0}, {1}, {2}]
    assert senders(equal, 0.005 * 100 * MBIT) == [set()] * 4
    assert senders(NODES, 0.003 * 100 * MBIT) == [{2}, set(), {0}, set()]


def test_links_without_a_queue_let_notices_pass() -> None:
    assert senders(FAT, 1e4, burst=0.0) == [set()] * 4
    assert notice_queues(NetworkArrays(ClusterSpec.uniform(nodes=1), Constants(burst=BURST)), BACKWARDS) == [[]]


def test_a_window_that_stands_before_a_slow_link_has_no_limit() -> None:
    (queue,) = notice_queues(NetworkArrays(FAT, Constants(burst=BURST)), BACKWARDS)[3][-1:]
    assert queue.max_piece == math.inf


@pytest.mark.parametrize(("rates", "measured"), [((400, 100, 100, 100), 0.350), ((100, 100, 100, 100), 0.327)])
def test_a_fat_node_delays_the_notices_of_others(rates: tuple[int, ...], measured: float) -> None:
    """An all-reduce of 2.5 MiB after a pause, measured on emulated links: 318 ms are those of the links alone."""
    cluster = ClusterSpec.star([rate * MBIT for rate in rates])
    pause = 0.03
    work = Workload(name="flat", variables=(Variable(name="p", shape=(2560 * 256,)),), forward_time=pause)
    made = compile_plan(builders.all_reduce(work, cluster), work, cluster)
    constants = Constants(cores=2, burst=BURST, accelerated=True)
    found = Replay(work, cluster, constants).predict(made, "frames").step_time - pause
    assert found == pytest.approx(measured, rel=0.05)
