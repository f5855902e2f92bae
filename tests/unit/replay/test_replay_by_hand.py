"""Step times that can be worked out on paper. A message alone on a link takes one second."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from replay_cases import (
    ELEMENTS,
    IDEAL,
    RATE,
    all_reduce,
    in_pairs,
    one_switch,
    owned_by,
    price,
    schedule,
    tree,
    workload,
)

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import (
    AllReduce,
    Compressor,
    Message,
    Round,
    Schedule,
    Tree,
    TreeTransfer,
    TwoLevelAllReduce,
    builders,
    compile_plan,
)
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Variable, Workload

LINE = {
    "format": "autosync-cluster/1",
    "name": "line",
    "nodes": [{"name": name} for name in "abc"],
    "links": [{"a": "a", "b": "b", "bandwidth": RATE}, {"a": "b", "b": "c", "bandwidth": RATE}],
}
RACKS = ClusterSpec.racks(racks=2, nodes_per_rack=2, bandwidth=RATE, uplink=RATE)
MIXED_RACKS = RACKS.with_rank_order(["node0", "node2", "node1", "node3"])
PAIRS = ClusterSpec.from_dict(
    {**one_switch(2, devices=2).to_dict(), "local_bandwidth": 1e15}, source="two nodes of two"
)
MIXED_PAIRS = PAIRS.with_rank_order(["node0", "node1", "node0", "node1"])

CASES: dict[str, tuple[Any, Any, float]] = {
    "two ranks, whole": (one_switch(2), [tree([-1, 0], 1)], 2.0),
    "two ranks, ten pieces: the last one comes down alone": (one_switch(2), [tree([-1, 0])], 1.1),
    "two ranks, whole, two roots: both ways at once": (one_switch(2), [tree([-1, 0], 1, second_root=1)], 1.0),
    "two ranks, ten pieces, two roots": (one_switch(2), [tree([-1, 0], second_root=1)], 1.0),
    "star: three flows into one link": (one_switch(4), [tree([-1, 0, 0, 0])], 3.3),
    "star on a fat node": (ClusterSpec.star([3 * RATE, RATE, RATE, RATE]), [tree([-1, 0, 0, 0])], 1.1),
    "star on a slow node": (ClusterSpec.star([RATE / 2, RATE, RATE]), [tree([-1, 0, 0])], 4.4),
    "chain over a line: four hops, ten pieces": (ClusterSpec.from_dict(LINE), [tree([-1, 0, 1])], 1.3),
    "chain, whole: four hops": (ClusterSpec.from_dict(LINE), [tree([-1, 0, 1], 1)], 4.0),
    "chain, whole, two roots": (ClusterSpec.from_dict(LINE), [tree([-1, 0, 1], 1, second_root=1)], 2.0),
    "chain, two roots, ten pieces": (ClusterSpec.from_dict(LINE), [tree([-1, 0, 1], second_root=1)], 1.1),
    "tree from the middle of a line": (ClusterSpec.from_dict(LINE), [tree([1, -1, 1])], 1.1),
    "binary tree of three": (one_switch(3), [tree([-1, 0, 0], 20)], 2.1),
    "ring of four": (one_switch(4), [all_reduce()], 1.5),
    "ring of two": (one_switch(2), [all_reduce()], 1.0),
    "ring over one slow link": (ClusterSpec.star([RATE, RATE, RATE, RATE / 2]), [all_reduce()], 3.0),
    "ring over uplinks once": (RACKS, [all_reduce()], 1.5),
    "ring over shared uplinks": (MIXED_RACKS, [all_reduce()], 3.0),
    "star over a shared uplink": (RACKS, [tree([-1, 0, 0, 0])], 3.3),
    "ring of two nodes of two": (PAIRS, [all_reduce()], 1.5),
    "ring of two nodes of two, mixed": (MIXED_PAIRS, [all_reduce()], 3.0),
    "star over two nodes of two": (PAIRS, [tree([-1, 0, 0, 0])], 2.2),
    "leaders of two nodes of two": (PAIRS, [tree([-1, 0, 0, 2])], 1.1),
    "all to all, even": (one_switch(4), [owned_by([0, 1, 2, 3])], 1.5),
    "all to all, one owner": (one_switch(3), [owned_by([0])], 4.0),
    "all to all, one fat owner": (ClusterSpec.star([2 * RATE, RATE, RATE]), [owned_by([0])], 2.0),
    "latency of two hops of two links": (one_switch(2, latency=0.01), [tree([-1, 0], 1)], 2.04),
    "latency of one hop of two links": (one_switch(2, latency=0.01), [tree([-1, 0], 1, second_root=1)], 1.02),
    "four ranks on two switches, two roots, whole": (RACKS, [tree([-1, 0, 0, 2], 1, second_root=2)], 3.0),
    "pairs of four: two exchanges of all": (one_switch(4), [in_pairs(range(4))], 2.0),
    "pairs of four, halves: half and a quarter, twice": (one_switch(4), [in_pairs(range(4), halves=True)], 1.5),
    "pairs of four, ten pieces keep the links full": (one_switch(4), [in_pairs(range(4), pieces=10)], 2.0),
    "pairs inside racks first: a quarter from two ranks": (RACKS, [in_pairs(range(4), halves=True)], 2.0),
    "pairs across racks first": (RACKS, [in_pairs([0, 2, 1, 3], halves=True)], 2.5),
    "pairs of two nodes of two": (PAIRS, [in_pairs(range(4))], 2.0),
    "latency of two exchanges": (one_switch(4, latency=0.01), [in_pairs(range(4))], 2.04),
    "latency of four exchanges": (one_switch(4, latency=0.01), [in_pairs(range(4), halves=True)], 1.58),
    "two collectives at a time": (one_switch(2), [all_reduce(), all_reduce()], 2.0),
}


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("name", CASES)
def test_step_time(name: str, detail: str) -> None:
    cluster, transfers, seconds = CASES[name]
    assert price(cluster, transfers, detail).step_time == pytest.approx(seconds, rel=2e-3)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_messages_on_one_connection_go_by_place_in_the_schedule(detail: str) -> None:
    spans = price(one_switch(2), [tree([-1, 0]), tree([-1, 0])], detail).timeline.messages
    assert [span.end for span in spans] == pytest.approx([1.1, 2.1], rel=1e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_priority_goes_before_place(detail: str) -> None:
    spans = price(one_switch(2), [tree([-1, 0]), tree([-1, 0])], detail, priorities=[0, 1]).timeline.messages
    # In frames, a first piece of the other message has left before the urgent one is there.
    assert [span.end for span in spans] == pytest.approx([2.1, 1.1], abs=0.11)
    assert spans[1].end < spans[0].end


def test_exchanges_between_pairs_share_links_where_ranks_are_early() -> None:
    """Ranks 0 and 2 send to rank 1 at once, over its one link; then it sends to both at once.

    A fluid lets the three exchanges follow each other.
    """
    assert price(one_switch(3), [in_pairs(range(3))], "frames").step_time == pytest.approx(4.0)
    assert price(one_switch(3), [in_pairs(range(3))], "fluid").step_time == pytest.approx(3.0)


def test_each_rank_sends_a_frame_in_each_exchange() -> None:
    assert price(one_switch(4), [in_pairs(range(4))]).frames == 4 * 2
    assert price(one_switch(4), [in_pairs(range(4), halves=True, pieces=10)]).frames == 4 * 4 * 10


def test_two_messages_between_different_pairs_share_a_link() -> None:
    """Both come to rank 0 over its one link, along chains whose ends they begin at, and go back likewise.

    A second to the middle of either chain, two to the root, where they share its link, two back, and one to the ends.
    """
    chains = [tree([-1, 0, 1], 1), tree([-1, 2, 0], 1)]
    spans = price(one_switch(3), chains).timeline.messages
    assert [span.end for span in spans] == pytest.approx([6.0, 6.0])


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_two_pipelines_between_different_pairs_share_links(detail: str) -> None:
    """Two chains of four without a common pair: an end of one is inside the other, so every link carries three."""
    chains = [tree([-1, 0, 1, 2], 250), tree([2, 3, -1, 0], 250)]
    spans = price(one_switch(4), chains, detail).timeline.messages
    assert [span.end for span in spans] == pytest.approx([3.0, 3.0], abs=0.1)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_communication_overlaps_with_backward(detail: str) -> None:
    work = workload(2, ready=[0.5, 1.0], backward_time=1.0)
    prediction = price(one_switch(2), [tree([-1, 0]), tree([-1, 0])], detail, work)
    assert [span.ready for span in prediction.timeline.messages] == pytest.approx([0.5, 1.0])
    assert [span.end for span in prediction.timeline.messages] == pytest.approx([1.6, 2.6], rel=1e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_a_long_backward_hides_communication(detail: str) -> None:
    work = workload(1, ready=[0.5], forward_time=0.5, backward_time=3.0, optimizer_time=0.25)
    assert price(one_switch(2), [tree([-1, 0])], detail, work).step_time == pytest.approx(3.75)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_sums_of_an_all_to_all_return_after_backward(detail: str) -> None:
    work = workload(1, ready=[0.5], backward_time=5.0)
    assert price(one_switch(2), [owned_by([0, 1])], detail, work).step_time == pytest.approx(5.5, rel=1e-3)


def test_a_sum_waits_until_its_receiver_has_sent_its_contributions_to_other_messages() -> None:
    # The first sum could return after 1 s. But the notice that rank 1 is ready for it waits on the connection to rank 0
    # behind rank 1's contribution to the second message.
    prediction = price(one_switch(2), [owned_by([0]), owned_by([0])], "frames", workload(2))
    assert [span.end for span in prediction.timeline.messages] == pytest.approx([3.0, 4.0], rel=1e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_collectives_start_in_schedule_order(detail: str) -> None:
    work = workload(2, ready=[2.0, 1.0], backward_time=2.0)
    spans = price(one_switch(2), [all_reduce(), all_reduce()], detail, work).timeline.messages
    # In frames, the second one's pieces stand in line behind the first one's.
    assert spans[0].start == pytest.approx(2.0)
    assert 2.0 <= spans[1].start <= 2.51
    assert spans[1].ready == pytest.approx(1.0)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_a_slow_node_is_waited_for(detail: str) -> None:
    data = one_switch(2).to_dict()
    data["nodes"][1]["speed"] = 0.5
    cluster = ClusterSpec.from_dict(data)
    work = workload(1, ready=[1.0], backward_time=1.0)
    assert price(cluster, [all_reduce()], detail, work).step_time == pytest.approx(3.0)


def test_unknown_ready_times_are_spread_over_backward() -> None:
    spans = price(one_switch(2), [all_reduce()] * 4, "fluid", workload(4, backward_time=2.0)).timeline.messages
    assert [span.ready for span in spans] == pytest.approx([2.0, 1.5, 1.0, 0.5])


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("constants", "seconds"),
    [
        ({"frame_cost": 0.01}, 2.04),  # two hops, each handled at both ends
        ({"reduce_rate": RATE}, 3.0),  # the root adds for a second
        ({"framing": 1.5}, 3.0),
        ({"copy_rate": RATE}, 4.0),  # packing lasts a second, and so does the copy into the gradient
        ({"host_cost": 2 / RATE}, 4.0),  # the hosts are twice as slow as the link
    ],
)
def test_costs_of_hosts(constants: dict[str, float], seconds: float, detail: str) -> None:
    prediction = price(one_switch(2), [tree([-1, 0], 1)], detail, constants=IDEAL.model_copy(update=constants))
    assert prediction.step_time == pytest.approx(seconds, rel=2e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("constants", "seconds"),
    [
        ({"frame_cost": 0.01}, 1.02),  # one hop
        ({"reduce_rate": RATE}, 2.0),  # both roots add for a second
        ({"copy_rate": RATE}, 4.0),  # packing, the copy of its own sum, and the copy into the gradient
    ],
)
def test_costs_of_two_roots(constants: dict[str, float], seconds: float, detail: str) -> None:
    transfers = [tree([-1, 0], 1, second_root=1)]
    prediction = price(one_switch(2), transfers, detail, constants=IDEAL.model_copy(update=constants))
    assert prediction.step_time == pytest.approx(seconds, rel=2e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize(
    ("constants", "whole", "halves"),
    [
        ({"frame_cost": 0.01}, 2.04, 1.58),  # two exchanges, or four
        ({"reduce_rate": RATE}, 4.0, 2.25),  # all ranks add two messages, or three quarters of one
        ({"copy_rate": RATE}, 6.0, 3.5),  # packing, and copying into the gradient; and both sums before they leave
    ],
)
def test_costs_of_exchanges_between_pairs(
    constants: dict[str, float], whole: float, halves: float, detail: str
) -> None:
    costly = IDEAL.model_copy(update=constants)
    for halved, seconds in ((False, whole), (True, halves)):
        prediction = price(one_switch(4), [in_pairs(range(4), halved)], detail, constants=costly)
        assert prediction.step_time == pytest.approx(seconds, rel=2e-2)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("transfers", [1, 2, 3, 4])
def test_every_native_transfer_of_a_message_costs_its_pieces(transfers: int, detail: str) -> None:
    """A ring of two has two steps of two pieces each, which both hosts send and receive; two rings run at once."""
    constants = IDEAL.model_copy(update={"message_cost": 0.5, "collectives": 2})
    edges = [ELEMENTS * place // transfers for place in range(transfers + 1)]
    rings = tuple(AllReduce(start, stop) for start, stop in itertools.pairwise(edges))
    message = Message(
        0, "parts", ("variable0",), ELEMENTS - 1, "float32", 0, 0, Compressor(), 0, (Round(ELEMENTS, rings),)
    )
    prediction = Replay(workload(1), one_switch(2), constants).predict(Schedule(2, (message,)), detail)
    handling = 2 * 2 * 2 * 0.5 * transfers
    assert prediction.demand[0, 4:6] == pytest.approx(handling)  # after the two links' four directions
    assert prediction.step_time == pytest.approx(handling)  # ... which one megabyte each way does not bind


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_shared_cores_bind_where_links_do_not(detail: str) -> None:
    constants = IDEAL.model_copy(update={"host_cost": 1 / RATE, "cores": 2.0})
    # A ring of four: 6 x S sent and 6 x S received in all, over two cores.
    seconds = 2 * 4 * 1.5 / 2
    assert price(one_switch(4), [all_reduce()], detail, constants=constants).step_time == pytest.approx(seconds)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_compression_halves_what_travels(detail: str) -> None:
    prediction = price(one_switch(2), [tree([-1, 0], 1)], detail, compressor=Compressor(kind="bf16"))
    assert prediction.step_time == pytest.approx(1.0)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_only_touched_rows_travel(detail: str) -> None:
    rows, width, touched = 10_000, 8, 1_000
    table = Variable(name="table", shape=(rows, width), kind="row_sparse", rows=touched)
    star = Tree((-1, 0))
    message = Message(
        0, "table", ("table",), rows * width, "float32", 0, rows, Compressor(), 0,
        (Round(rows * width, (TreeTransfer(0, rows * width, star, star, 1),)),),
    )  # fmt: skip
    work = Workload(name="rows", variables=(table,))
    prediction = Replay(work, one_switch(2), IDEAL).predict(Schedule(2, (message,)), detail)
    # An index of 2 bytes a row; two ranks share a tenth of their rows by chance.
    assert prediction.step_time == pytest.approx((1_000 + 1_900) * (2 + 4 * width) / RATE)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_rows_that_are_gathered_travel_once(detail: str) -> None:
    rows, width, touched = 10_000, 8, 1_000
    table = Variable(name="table", shape=(rows, width), kind="row_sparse", rows=touched)
    work = Workload(name="rows", variables=(table,))
    cluster = one_switch(3)
    made = compile_plan(builders.gathered_rows(work, cluster), work, cluster)
    prediction = Replay(work, cluster, IDEAL).predict(made, detail)
    # Each rank receives the rows of two others, with an index of 2 bytes a row.
    assert prediction.step_time == pytest.approx(2 * 1_000 * (2 + 4 * width) / RATE, rel=0.02)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("plan", ["ps", "gathered_rows", "all_reduce"])
@pytest.mark.parametrize("kind", ["row_sparse", "sparse"])
def test_a_rank_writes_the_rows_that_any_rank_touched(kind: Any, plan: str, detail: str) -> None:
    rows, width, touched, rate = 10_000, 8, 1_000, RATE / 10
    table = Variable(name="table", shape=(rows, width), kind=kind, rows=touched)
    work, cluster = Workload(name="rows", variables=(table,)), one_switch(2)
    made = compile_plan(builders.build(plan, work, cluster), work, cluster)
    slow = IDEAL.model_copy(update={"decode": IDEAL.decode.model_copy(update={"rows": rate})})
    ideal, found = (Replay(work, cluster, hosts).predict(made, detail).step_time for hosts in (IDEAL, slow))
    # A sparse gradient takes the rows as they are.
    assert found - ideal == pytest.approx(1_900 * (2 + 4 * width) / rate if kind == "row_sparse" else 0.0)


def test_one_rank_only_computes() -> None:
    work = workload(1, backward_time=1.0, forward_time=0.5)
    cluster = ClusterSpec.uniform(nodes=1, bandwidth=RATE)
    made = schedule(1, [all_reduce()])
    assert Replay(work, cluster, IDEAL).predict(made).step_time == pytest.approx(1.5)
    assert made.messages[0].numel == ELEMENTS - 1


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_collectives_in_two_levels(detail: str) -> None:
    """Half the data around each node and back over fast local links; between nodes each rank's half, once each way."""
    transfer = TwoLevelAllReduce(0, ELEMENTS, ((0, 1), (2, 3)))
    # Both ranks of a node send their halves over the node's one link: twice half of 2 (2 - 1) / 2 megabytes.
    assert price(PAIRS, [transfer], detail).step_time == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_a_rested_link_passes_its_burst_at_once(detail: str) -> None:
    constants = IDEAL.model_copy(update={"burst": 0.25e6})
    work = workload(1, forward_time=1.0)
    # A quarter of the megabyte passes at once each way, after forward has filled the buckets. A fluid counts the way of
    # a last piece that in frames still finds tokens.
    prediction = price(one_switch(2), [tree([-1, 0])], detail, work, constants)
    assert prediction.step_time == pytest.approx(1.75, abs=0.11)


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_a_link_without_rest_has_no_burst(detail: str) -> None:
    constants = IDEAL.model_copy(update={"burst": 0.25e6})
    # Around a ring of two every link is always busy: step after step takes what the rates take.
    assert price(one_switch(2), [all_reduce()], detail, constants=constants).step_time == pytest.approx(1.0, rel=2e-2)


def test_an_accelerator_computes_while_gradients_are_packed() -> None:
    costly = IDEAL.model_copy(update={"gradient_cost": 0.25})
    work = workload(2, ready=[0.5, 1.0], backward_time=1.0)
    for accelerated, expected in ((False, [0.75, 1.5]), (True, [0.75, 1.25])):
        constants = costly.model_copy(update={"accelerated": accelerated})
        spans = price(one_switch(2), [all_reduce()] * 2, "fluid", work, constants).timeline.messages
        assert [span.ready for span in spans] == pytest.approx(expected)


def test_gradients_of_one_moment_are_packed_in_ready_order() -> None:
    work = workload(3, ready=[1.0, 1.0, 1.0], backward_time=1.0)
    costly = IDEAL.model_copy(update={"gradient_cost": 0.25, "accelerated": True})
    spans = price(one_switch(2), [all_reduce()] * 3, "fluid", work, costly).timeline.messages
    assert [span.ready for span in spans] == pytest.approx([1.75, 1.5, 1.25])  # the last layer first


def test_a_root_encodes_a_sum_once() -> None:
    """As many bytes as any other rank encodes; it decodes the contribution, and the other rank the sum."""
    constants = IDEAL.model_copy(update={"encode": IDEAL.encode.model_copy(update={"int8": 4e6})})
    made = price(one_switch(2), [tree([-1, 0])], "fluid", constants=constants, compressor=Compressor(kind="int8"))
    assert made.demand[0, -2:] == pytest.approx([0.25, 0.25], rel=1e-3)
