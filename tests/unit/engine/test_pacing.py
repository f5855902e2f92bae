"""Connections are held to their part of a link: which part, and that the kernel obeys."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from termios import TIOCOUTQ
from typing import cast

import pytest
from clusters import shared_nodes, two_interfaces, uneven_cluster

from lightning_autosync.cluster import ClusterSpec, LinkGraph, resolve_cluster
from lightning_autosync.engine import connections, transport
from lightning_autosync.engine.connections import Blocks, limit_queue, tune_connection
from lightning_autosync.engine.transport import Frame, Peer, Transport
from lightning_autosync.errors import ClusterError
from lightning_autosync.plan import (
    Compressor,
    Message,
    Round,
    Schedule,
    SyncPlan,
    Tree,
    TreeTransfer,
    builders,
    compile_plan,
)
from lightning_autosync.plan.pacing import (
    HEADROOM,
    LEAST_PART,
    PAYLOAD_SHARE,
    Need,
    _with_neighbours,
    pipeline_stretches,
    sending_needs,
)
from lightning_autosync.workload import Variable, Workload

LARGE = Workload(name="large", variables=tuple(Variable(name=f"v{index}", shape=(400_000,)) for index in range(4)))
RATES = ("bandwidth", "reverse_bandwidth")
RACKS = {"racks": 2, "nodes_per_rack": 3, "bandwidth": 4e7, "uplink": 2e7}


def schedule(builder: str, cluster: ClusterSpec, workload: Workload = LARGE) -> Schedule:
    plan: SyncPlan = builders.find(builder)(workload, cluster)
    return compile_plan(plan, workload, cluster)


def paces_of(made: Schedule, topology: LinkGraph, rank: int) -> dict[int, float]:
    """The paces of those connections that have one."""
    needs = sending_needs(made, topology, rank)
    return {peer: need.pace for peer, need in needs.items() if need.pace is not None}


def on_the_wire(made: Schedule, topology: LinkGraph, rank: int) -> dict[int, float]:
    """What the bytes alone ask for: without headroom and the time to fill a pipeline, framing included."""
    stretches = pipeline_stretches(made, rank)
    rates = paces_of(made, topology, rank)
    return {peer: rate / PAYLOAD_SHARE / HEADROOM / stretches[peer] for peer, rate in rates.items()}


def racks() -> ClusterSpec:
    return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "racks", "racks": RACKS})


def test_a_leaf_divides_its_link_as_its_bytes() -> None:
    cluster = uneven_cluster(8)
    rates = on_the_wire(schedule("packed_trees", cluster), LinkGraph(cluster), 3)
    # Trees of weights 15/22 at the fat node and 1/22 at each leaf: 16/22 of the bytes up to it, 2/22 to each leaf,
    # and 28/22 in all, for which the leaf's 1e7 bytes/s are just enough.
    assert rates.pop(0) == pytest.approx(1e7 * 16 / 28, rel=1e-3)
    assert rates == {peer: pytest.approx(1e7 * 2 / 28, rel=1e-3) for peer in (1, 2, 4, 5, 6, 7)}


@pytest.mark.parametrize("builder", ["packed_trees", "byteps"])
@pytest.mark.parametrize("cluster", [uneven_cluster(8), racks()], ids=["star", "racks"])
def test_connections_fill_the_fullest_channel_and_no_other_overflows(builder: str, cluster: ClusterSpec) -> None:
    topology = LinkGraph(cluster)
    loads: dict[int, float] = defaultdict(float)
    made = schedule(builder, cluster)
    for rank in range(cluster.world_size):
        rates = on_the_wire(made, topology, rank)
        peers = {peer for edge in made.tree_edges() if rank in edge for peer in edge} - {rank}
        assert rates.keys() <= peers
        for peer, rate in rates.items():
            for channel in topology.route(rank, peer):
                loads[channel] += rate / topology.capacities[channel]
    # Up to the small ones that are left alone.
    assert max(loads.values()) == pytest.approx(1.0, abs=2 * LEAST_PART)


def test_a_connection_that_needs_all_of_its_route_has_no_limit() -> None:
    cluster = uneven_cluster(4)  # one star around the fat node is the best packing
    assert paces_of(schedule("packed_trees", cluster), LinkGraph(cluster), 2) == {}


def test_a_connection_that_one_of_several_messages_needs_alone_has_no_limit() -> None:
    cluster = ClusterSpec.star(bandwidths=[1e7] * 4)
    plan = builders.ps_load_balancing(LARGE, cluster)
    assert {owner for group in plan.groups for owner in group.placement or ()} == {0, 1, 2, 3}
    made = compile_plan(
        SyncPlan.from_dict(
            {**plan.to_dict(), "groups": [{**group, "topology": "star"} for group in plan.to_dict()["groups"]]}
        ),
        LARGE,
        cluster,
    )
    for rank in range(4):
        assert paces_of(made, LinkGraph(cluster), rank) == {}
    # A server hears all others at once and sends to each a third of its link; a leaf has its own to itself.
    alone = Schedule(4, made.messages[:1])
    server = made.messages[0].rounds[0].transfers[0].root
    assert on_the_wire(alone, LinkGraph(cluster), server) == {
        peer: pytest.approx(1e7 / 3) for peer in {0, 1, 2, 3} - {server}
    }


def star_of(root: int, start: int, stop: int, interface: int = 0) -> TreeTransfer:
    tree = Tree(tuple(-1 if rank == root else root for rank in range(4)), interface)
    return TreeTransfer(start, stop, tree, tree, 10)


def equal_shards(interface: int = 0) -> list[TreeTransfer]:
    return [star_of(root, 100 * root, 100 * root + 100, interface) for root in range(4)]


def test_connections_beside_one_without_a_pace_have_none() -> None:
    """Else they would fall behind it, and could not catch up."""
    topology = LinkGraph(ClusterSpec.star(bandwidths=[4e7, 1e7, 1e7, 1e7]))
    assert [len(paces_of(by_hand([equal_shards()]), topology, rank)) for rank in range(4)] == [3, 3, 3, 3]
    # For the second message, each leaf has its link to itself.
    mixed = by_hand([equal_shards()], [[star_of(0, 0, 100)]])
    needs = sending_needs(mixed, topology, 1)
    assert needs == {peer: Need(pytest.approx(PAYLOAD_SHARE * 1e7 / 3), None) for peer in (2, 3)}
    assert [len(paces_of(mixed, topology, rank)) for rank in range(4)] == [0, 0, 0, 0]


def test_connections_of_other_links_keep_their_paces() -> None:
    topology = LinkGraph(two_interfaces([4e7, 1e7, 1e7, 1e7], [4e7, 1e7, 1e7, 1e7]))
    mixed = by_hand([equal_shards()], [equal_shards(interface=1)], [[star_of(0, 0, 100)]])
    for rank in range(4):
        paced = [[need.pace for need in sending_needs(mixed, topology, rank, each).values()] for each in (0, 1)]
        assert not any(paced[0])
        assert len(paced[1]) == 3
        assert all(paced[1])


def test_neighbours_share_the_link_that_limits_one_of_them() -> None:
    one, two, three, other = ((0, peer, 0) for peer in (1, 2, 3, 4))
    channels = {one: (1, 2), two: (2, 3), three: (3, 4), other: (5,)}
    assert _with_neighbours({one}, channels, {2: [two], 3: [three], 5: [other]}) == {one, two, three}
    assert _with_neighbours({one}, channels, {2: [one], 3: [two, three], 5: [other]}) == {one}
    assert _with_neighbours(set(), channels, {2: [two]}) == set()


def by_hand(*messages: Sequence[Sequence[TreeTransfer]]) -> Schedule:
    """Messages for four ranks, each of rounds, each of transfers."""
    return Schedule(
        4,
        tuple(
            Message(
                index, f"m{index}", (f"v{index}",), rounds[0][-1].stop - 1, "float32", 0, 0, Compressor(), 0,
                tuple(Round(transfers[-1].stop, tuple(transfers)) for transfers in rounds),
            )
            for index, rounds in enumerate(messages)
        ),
    )  # fmt: skip


def chained(pieces: int) -> TreeTransfer:
    """So many pieces along a chain of four: two hops up to its second rank at most, and two down again."""
    tree = Tree((1, -1, 1, 2))
    return TreeTransfer(0, 10 * pieces, tree, tree, 10)


def test_a_short_pipeline_is_given_the_time_to_fill() -> None:
    assert pipeline_stretches(by_hand([[chained(3)]]), 2) == {1: pytest.approx(6 / 3), 3: pytest.approx(6 / 3)}
    assert pipeline_stretches(by_hand([[chained(3)]]), 0) == {1: pytest.approx(6 / 3)}
    assert pipeline_stretches(by_hand([[chained(300)]]), 2)[1] == pytest.approx(1.01)
    # Messages that follow keep it filled; rounds wait for each other.
    assert pipeline_stretches(by_hand(*[[[chained(count)]] for count in (3, 1, 1)]), 2)[1] == pytest.approx(8 / 5)
    assert pipeline_stretches(by_hand([[chained(3)], [chained(3)]]), 2)[1] == pytest.approx(12 / 6)


def beside_a_star(few: int, segment: int) -> Schedule:
    """A thousand elements: ``few`` over a star around rank 1, the others over one around rank 0, ten at a time."""
    first, second = Tree((-1, 0, 0, 0)), Tree((1, -1, 1, 1))
    edge = 1000 - few
    return by_hand([[TreeTransfer(0, edge, first, first, 10), TreeTransfer(edge, 1000, second, second, segment)]])


def test_paces_are_what_bytes_ask_for_and_pipelines_need() -> None:
    topology = LinkGraph(ClusterSpec.star(bandwidths=[1e7] * 4))
    paces = paces_of(beside_a_star(few=90, segment=45), topology, 2)
    # Rank 0 hears the first part from all others, and rank 1 their second part and the first one's sum.
    unit = PAYLOAD_SHARE * HEADROOM * 1e7
    assert paces == {
        0: pytest.approx(unit * 910 / (3 * 910 + 90) * 92 / 91),
        1: pytest.approx(unit * 90 / (3 * 90 + 910) * 3 / 2),
    }


def test_a_connection_of_few_bytes_has_no_limit_however_few_its_pieces() -> None:
    topology = LinkGraph(ClusterSpec.star(bandwidths=[1e7] * 4))
    assert paces_of(beside_a_star(few=15, segment=15), topology, 2).keys() == {0}


def test_rows_keep_their_route() -> None:
    cluster = uneven_cluster(8)
    table = Workload(name="table", variables=(Variable(name="t", shape=(4000, 16), kind="row_sparse", rows=10),))
    made = schedule("packed_trees", cluster, table)
    assert paces_of(made, LinkGraph(cluster), 3) == {}
    # Each transfer may have all rows. In one a leaf's link carries only these, in another they arrive alone.
    assert len(made.messages[0].rounds[0].transfers) > 1
    assert sending_needs(made, LinkGraph(cluster), 3) == {}
    # With one server, a connection needs its part of the server's link.
    equal = ClusterSpec.star(bandwidths=[1e7] * 6)
    made = schedule("ps_load_balancing", equal, table)
    server = made.messages[0].rounds[0].transfers[0].root
    needs = sending_needs(made, LinkGraph(equal), server)
    assert needs == {peer: Need(pytest.approx(PAYLOAD_SHARE * 1e7 / 5), None) for peer in {*range(6)} - {server}}


def test_ranks_of_one_node_share_no_link() -> None:
    cluster = shared_nodes(6)
    for rank in range(6):
        peers = paces_of(schedule("byteps", cluster), LinkGraph(cluster), rank).keys()
        assert peers == set(range(6)) - {rank, rank ^ 1}


def test_unknown_rates_give_no_pace() -> None:
    known = uneven_cluster(3)
    cluster = known.model_copy(
        update={"links": tuple(link.model_copy(update=dict.fromkeys(RATES)) for link in known.links)}
    )
    made = schedule("byteps", known)
    with pytest.raises(ClusterError, match="measure them with"):
        paces_of(made, LinkGraph(cluster), 0)


@pytest.mark.parametrize(("pace", "size", "least", "most"), [(1e3, 4096, 0.0, 2.0), (2e6, 3_000_000, 0.8, 9.0)])
def test_the_kernel_holds_large_messages_back_and_lets_small_ones_pass(
    pace: float, size: int, least: float, most: float
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        tune_connection(one, None, Need(pace, pace))
        other.settimeout(10)
        payload = memoryview(bytes(size))
        start = time.monotonic()
        received = 0
        while received < size:
            with suppress(BlockingIOError):
                payload = payload[one.send(payload) :]
            received += len(other.recv(size))
        # The first ten segments of a connection pass at once, on loopback of 64 KiB each.
        assert least < time.monotonic() - start < most


class BusyConnection:
    """A socket whose last round trips took 9 ms, and whose first one 20 us; it notes the options that are set."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return (bytes(68) + struct.pack("=I", 9000) + bytes(76) + struct.pack("=I", 20))[:size]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options[option] = value


def test_a_queue_holds_what_an_empty_link_carries() -> None:
    connection = BusyConnection()
    limit_queue(cast(socket.socket, connection), (1e8, 1e8))
    assert connection.options == {socket.SO_SNDBUF: 202_000}  # a round trip and 2 ms


@pytest.mark.parametrize(
    ("rate", "paced", "bytes_held"),
    [
        (2.5e7, True, 50_500),
        (5e6, True, 32 * 1024),
        (1e6, True, 20_000),
        (1e5, True, 8 * 1024),
        (5e6, False, 100_000),
        (2.5e7, False, 202_000),
        (1e6, False, 20_000),
    ],
)
def test_a_connection_that_needs_a_part_of_its_route_queues_its_part(rate: float, paced: bool, bytes_held: int) -> None:
    connection = BusyConnection()
    limit_queue(cast(socket.socket, connection), (1e8, 1e8), Need(rate, rate if paced else None))
    assert connection.options == {socket.SO_SNDBUF: bytes_held}


def test_many_connections_over_a_slow_link_fit_into_its_queue() -> None:
    """Racks whose uplinks carry 100 ms of data in their queues, as the emulated ones."""
    cluster = resolve_cluster("two_racks_8to1")
    topology = LinkGraph(cluster)
    held = 0
    for rank in range(4):
        for peer, need in sending_needs(schedule("byteps", cluster), topology, rank).items():
            connection = BusyConnection()
            rates = topology.bandwidth(rank, peer), topology.bandwidth(peer, rank)
            limit_queue(cast(socket.socket, connection), rates, need)
            held += connection.options[socket.SO_SNDBUF] if peer >= 4 else 0
    assert 2 * held < 0.1 * topology.bandwidth(0, 4)  # Linux doubles the sizes of buffers


def test_a_transport_limits_queues_by_its_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    limited: list[Need | None] = []
    for module in (connections, transport):
        monkeypatch.setattr(module, "limit_queue", lambda _, __, need: limited.append(need))
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    peer = Peer(1)
    need = Need(2.5e7, None)
    made = Transport({peer: one}, {peer: (1e8, 1e8)}, {peer: need})
    with other:
        for step in (1, 2):
            made.submit(partial(made.send, peer, Frame(0, step, 0, 0, 0, 0), memoryview(b""), (0.0,)))
        made.close()
    assert limited == [need, need]  # when it was opened, and before the second step


class OneBlockAtATime:
    """A socket that takes ``most`` bytes at once; it notes how many, and whether a record was to end there."""

    def __init__(self, most: int = 2**16) -> None:
        self.blocks: list[tuple[int, bool]] = []
        self.data = b""
        self._most = most

    def sendmsg(self, buffers: list[memoryview], ancillary: tuple[()] = (), flags: int = 0) -> int:
        taken = b"".join(buffers)[: self._most]
        self.data += taken
        self.blocks.append((len(taken), flags == socket.MSG_EOR))
        return self.blocks[-1][0]


def test_a_narrow_connection_sends_in_blocks() -> None:
    connection, blocks = OneBlockAtATime(), Blocks(8000)
    frames = [bytes([place]) * size for place, size in enumerate((20_000, 1000, 1000, 1000, 1000, 9000))]
    for frame in frames:
        buffers = [memoryview(b"head"), memoryview(frame)]
        while buffers:
            count = blocks.send(cast(socket.socket, connection), buffers)
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][count:]
    assert connection.data == b"".join(b"head" + frame for frame in frames)
    assert connection.blocks == [
        (8000, True),
        (8000, True),
        (4004, True),
        (1004, False),
        (1004, False),
        (1004, False),
        (1004, True),
        (8000, True),
        (1004, False),
    ]


def test_a_block_of_which_the_kernel_takes_a_part_does_not_end_a_record() -> None:
    connection, blocks = OneBlockAtATime(most=3000), Blocks(8000)
    for size in (8000, 1000, 1000):
        blocks.send(cast(socket.socket, connection), [memoryview(bytes(size))])
    assert connection.blocks == [(3000, True), (1000, True), (1000, False)]


def test_only_narrow_connections_that_share_a_route_send_in_blocks() -> None:
    def block(need: Need | None) -> int | None:
        return limit_queue(cast(socket.socket, BusyConnection()), (1e8, 1e8), need)

    assert block(Need(1e6, 1e6)) == block(Need(1e6, None)) == 20_000
    assert block(None) is block(Need(5e7, 5e7)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux fills segments so")
@pytest.mark.parametrize("blocks", [Blocks(8192), Blocks(None)])
def test_the_kernel_takes_over_no_more_than_asked_for(blocks: Blocks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        tune_connection(one, None, Need(1e3, 1e3))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        with suppress(BlockingIOError):  # the first segments leave without a pace
            while True:
                blocks.send(one, [memoryview(bytes(100))])
        held = struct.unpack("i", ioctl(one, TIOCOUTQ, bytes(4)))[0]
    assert held < 3 * 8192 if blocks.size else held > 3 * 8192
