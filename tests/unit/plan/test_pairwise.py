"""Exchanges between pairs of ranks: what each rank sends, receives and adds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import PairwiseReduce, Schedule, builders, compile_plan, topologies
from lightning_autosync.plan.pacing import sending_needs
from lightning_autosync.plan.pairwise import Kind
from lightning_autosync.plan.schedule import Compressor, Message, Round
from lightning_autosync.plan.topologies import Facts
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.replay import Replay
from lightning_autosync.workload import Variable, Workload

SHAPES = {"recursive_doubling": False, "halving_doubling": True}
WORKLOAD = Workload(name="one", variables=(Variable(name="weight", shape=(1000,)),))


def compiled(cluster: ClusterSpec, topology: str, **fields: Any) -> Schedule:
    plan = builders.all_reduce(WORKLOAD, cluster, topology=topology)
    group = plan.groups[0].model_copy(update=fields)
    return compile_plan(plan.model_copy(update={"groups": (group,)}), WORKLOAD, cluster)


def transfer(schedule: Schedule) -> PairwiseReduce:
    (found,) = schedule.messages[0].rounds[0].transfers
    assert isinstance(found, PairwiseReduce)
    return found


@given(
    ranks=st.integers(1, 20),
    elements=st.integers(1, 40),
    segment=st.integers(1, 40),
    halves=st.booleans(),
    seed=st.randoms(use_true_random=False),
)
def test_every_contribution_is_in_every_sum_once(
    ranks: int, elements: int, segment: int, halves: bool, seed: Any
) -> None:
    order = list(range(ranks))
    seed.shuffle(order)
    reduce = PairwiseReduce(3, 3 + elements, segment, tuple(order), halves)
    # For each rank and element: how often it holds the contribution of each rank.
    held = [[[int(own == rank) for own in range(ranks)] for _ in range(3 + elements)] for rank in range(ranks)]
    for piece in reduce.pieces:
        turns = [{turn.number: turn for turn in reduce.turns(rank, piece)} for rank in range(ranks)]
        for number in range(len(reduce.swaps)):
            before = [[list(counts) for counts in row] for row in held]
            for rank, own in enumerate(turns):
                if number not in own:
                    continue
                turn = own[number]
                other = turns[turn.peer][number]
                assert other.peer == rank
                assert other.sends == turn.receives
                for place in range(*turn.receives or (0, 0)):
                    came = before[turn.peer][place]
                    kept = before[rank][place] if turn.adds else [0] * ranks
                    held[rank][place] = [a + b for a, b in zip(came, kept, strict=True)]
    assert all(counts == [1] * ranks for row in held for counts in row[3:])


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("topology", SHAPES)
def test_the_number_of_exchanges_is_logarithmic(topology: str, ranks: int) -> None:
    schedule = compiled(ClusterSpec.uniform(ranks), topology)
    found, levels = transfer(schedule), int(math.log2(ranks))
    kinds = [Kind.HALVE] * levels + [Kind.GATHER] * levels if SHAPES[topology] else [Kind.WHOLE] * levels
    beyond = ranks - 2**levels
    assert [swap.kind for swap in found.swaps] == ([Kind.FOLD, *kinds, Kind.UNFOLD] if beyond else kinds)
    # Each of the first pairs has one rank beyond the power of two.
    assert schedule.tree_edges() >= {(2 * pair, 2 * pair + 1) for pair in range(beyond)}
    assert len(schedule.tree_edges()) == beyond + levels * 2**levels // 2
    assert schedule.interfaces == (0,)
    assert schedule.tree_edges(1) == set()
    assert schedule.messages[0].on_trees


def test_the_largest_parts_stay_in_a_rack() -> None:
    """Ranks of two racks alternate; three exchanges, of which the last one crosses racks with an eighth."""
    cluster = ClusterSpec.racks(racks=2, nodes_per_rack=4, bandwidth=1e8, uplink=1e8)
    mixed = cluster.with_rank_order(
        [f"node{node}" for pair in zip(range(4), range(4, 8), strict=True) for node in pair]
    )
    found = transfer(compiled(mixed, "halving_doubling"))
    assert found.order == (0, 2, 4, 6, 1, 3, 5, 7)
    crosses = [any(one % 2 != other % 2 for one, other in swap.sending) for swap in found.swaps]
    assert crosses == [False, False, True, True, False, False]
    assert [swap.share for swap in found.swaps] == [1 / 2, 1 / 4, 1 / 8, 1 / 8, 1 / 4, 1 / 2]


def test_bytes_that_ranks_send() -> None:
    cluster = ClusterSpec.uniform(5)
    elements = 1001  # and one count
    # Rank 0 gives its contribution to rank 1, which returns the sum.
    assert sent_bytes(compiled(cluster, "recursive_doubling")) == [4 * elements * times for times in (1, 3, 2, 2, 2)]
    outer, partner, *others = sent_bytes(compiled(cluster, "halving_doubling"))
    assert outer == 4 * elements
    assert partner + sum(others) == 4 * elements * (1 + 4 * 1.5)


def test_pieces_have_the_length_of_a_segment() -> None:
    found = transfer(compiled(ClusterSpec.uniform(4), "recursive_doubling", segment=1200))
    assert list(found.pieces) == [(0, 300), (300, 600), (600, 900), (900, 1001)]


def test_exchanges_have_the_whole_link_one_after_the_other() -> None:
    """Two nodes of two ranks: both ranks of a node cross the link at the same time, and so need half of it."""
    cluster = ClusterSpec.uniform(2, devices=2, bandwidth=1e8)
    schedule = compiled(cluster, "recursive_doubling")
    ((peer, need),) = sending_needs(schedule, LinkGraph(cluster), 0).items()
    assert peer == 2
    assert need.rate == pytest.approx(0.5e8, rel=0.1)
    assert need.pace is None
    alone = ClusterSpec.uniform(4, bandwidth=1e8)
    assert sending_needs(compiled(alone, "halving_doubling"), LinkGraph(alone), 0) == {}


@pytest.mark.parametrize("topology", SHAPES)
def test_what_it_cannot_carry(topology: str) -> None:
    cluster = ClusterSpec.uniform(4)
    group = builders.all_reduce(WORKLOAD, cluster, topology=topology).groups[0].model_dump()
    for fields, words in (
        ({"compressor": "int8"}, f"topology: '{topology}' does not support compression; compressor must be 'none'"),
        ({"architecture": "parameter_server"}, f"topology: '{topology}' does not support 'parameter_server'"),
        ({"local_aggregation": True}, f"local_aggregation: not allowed with topology '{topology}'"),
    ):
        with pytest.raises(ValueError, match=words):
            type(builders.all_reduce(WORKLOAD, cluster).groups[0]).model_validate(group | fields)
    rows = Workload(name="rows", variables=(Variable(name="table", shape=(100, 4), kind="row_sparse"),))
    with pytest.raises(PlanError, match=f"topology: '{topology}' takes dense gradients only, but 'table' has"):
        compile_plan(builders.all_reduce(rows, cluster, topology=topology), rows, cluster)


def test_a_message_of_pairs_is_not_compressed() -> None:
    whole = (Round(4, (PairwiseReduce(0, 4, 4, (0, 1), False),)),)
    with pytest.raises(ValueError, match="message 'one': rows and compressed messages need trees with one root"):
        Message(0, "one", ("weight",), 3, "float32", 0, 0, Compressor(kind="int8"), 0, whole)


@pytest.mark.parametrize(("topology", "size"), [("recursive_doubling", 8), ("halving_doubling", 32)])
def test_small_messages_among_many_ranks_are_soonest_there(topology: str, size: int) -> None:
    """By the replay: so many KiB among 64 ranks, 1 Gbit/s, 50 us from one rank to another."""
    workload = Workload(name="small", variables=(Variable(name="weight", shape=(256 * size,), ready=0.0),))
    cluster = ClusterSpec.uniform(64, bandwidth="1 Gbit/s", latency="25 us")
    replay = Replay(workload, cluster)
    plans = {name: builders.build(name, workload, cluster) for name in ("ps", "byteps", "packed_trees")}
    for name in ("native", "ring", "tree", "double_tree", *SHAPES):
        plans[name] = builders.all_reduce(workload, cluster, topology=name)
    found = {
        name: replay.predict(compile_plan(plan, workload, cluster)).step_time for name, plan in sorted(plans.items())
    }
    assert min(found, key=lambda name: found[name]) == topology
    others = min(seconds for name, seconds in found.items() if name not in SHAPES)
    assert others > 1.5 * found[topology]


def test_spaces_offer_it_for_dense_blocks_among_eight_ranks_or_more() -> None:
    for ranks, offered in ((7, set()), (8, SHAPES.keys())):
        facts = Facts(ClusterSpec.uniform(ranks))
        assert SHAPES.keys() & {*topologies.methods(facts, dense=True)} == offered
        assert not SHAPES.keys() & {*topologies.methods(facts, dense=False)}
