"""What latencies cost, against times measured with gloo over links that delay every byte by 20 ms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from replay_cases import ELEMENTS, IDEAL, all_reduce, owned_by, price, schedule, tree, workload

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.plan import AllReduce, Round, Transfer, builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload

ONE_WAY = 0.02
DETAILS = pytest.mark.parametrize("detail", ["frames", "fluid"])


def delayed(ranks: int, one_way: float = ONE_WAY, bandwidth: float = 1e12) -> ClusterSpec:
    """Ranks around a switch, half of the way from each other."""
    return ClusterSpec.uniform(nodes=ranks, bandwidth=bandwidth, latency=one_way / 2)


@DETAILS
@pytest.mark.parametrize(("ranks", "at_once", "measured"), [(2, 1, 0.081), (4, 1, 0.243), (4, 8, 0.980)])
def test_a_step_of_a_ring_waits_for_the_receivers_notice(
    ranks: int, at_once: int, measured: float, detail: str
) -> None:
    transfers = [all_reduce()] * at_once
    assert price(delayed(ranks), transfers, detail, constants=Constants()).step_time == pytest.approx(measured, 0.05)


@DETAILS
@pytest.mark.parametrize(("ranks", "measured"), [(2, 0.0411), (4, 0.0416)])
def test_an_all_to_all_waits_for_the_receivers_notice_each_way(ranks: int, measured: float, detail: str) -> None:
    """Contributions go to the owners, and sums return."""
    found = price(delayed(ranks), [owned_by(range(ranks))], detail, constants=Constants()).step_time
    assert found == pytest.approx(2 * measured, 0.05)


@DETAILS
def test_a_hop_of_a_tree_needs_no_notice(detail: str) -> None:
    assert price(delayed(2), [tree([-1, 0], 1)], detail).step_time == pytest.approx(2 * ONE_WAY, 1e-3)


@DETAILS
def test_a_ring_hides_latencies_that_are_shorter_than_a_piece(detail: str) -> None:
    """Two steps of two pieces of a quarter second; only the last piece's latency comes on top."""
    found = price(delayed(2, one_way=0.05, bandwidth=1e6), [all_reduce()], detail).step_time
    assert found == pytest.approx(1.0 + 2 * 0.05, 1e-3)


@DETAILS
def test_a_ring_has_two_pieces_under_way(detail: str) -> None:
    """Each of 1 / 4 s and 0.5 s of latencies: two steps of two pieces take 0.75 s each, and the last piece 0.25 s."""
    found = price(delayed(2, one_way=0.25, bandwidth=1e6), [all_reduce()], detail).step_time
    assert found == pytest.approx(2 * 0.75 + 0.25, 1e-3)


@DETAILS
def test_rings_at_once_wait_together(detail: str) -> None:
    """Of the first ring's waits of 0.75 s, the second one fills 0.25 s; both wait half a second for their last pieces.

    Pieces of 1 / 4 s leave one after the other: two seconds of data.
    """
    found = price(delayed(2, one_way=0.25, bandwidth=1e6), [all_reduce()] * 2, detail).step_time
    assert found == pytest.approx(2.0 + 0.5, 1e-3)


@DETAILS
@pytest.mark.parametrize(("parts", "seconds"), [([2, 2, 2, 2], 0.08), ([1, 2, 1], 0.04), ([3, 1], 0.04), ([5], 0.06)])
def test_native_transfers_take_a_thread_each(parts: list[int], seconds: float, detail: str) -> None:
    """Each takes two hops of 10 ms, 5 ms for the notice and 5 ms for the data, and two run at once."""
    whole = schedule(2, [all_reduce()] * len(parts))
    messages = []
    for message, count in zip(whole.messages, parts, strict=True):
        edges = [ELEMENTS * place // count for place in range(count + 1)]
        rings = tuple(AllReduce(start, stop) for start, stop in itertools.pairwise(edges))
        messages.append(replace(message, rounds=(Round(ELEMENTS, rings),)))
    pricing = Replay(workload(len(parts)), delayed(2, one_way=0.005), IDEAL)
    assert pricing.predict(replace(whole, messages=tuple(messages)), detail).step_time == pytest.approx(seconds, 0.05)


@DETAILS
@pytest.mark.parametrize(("transfer", "seconds"), [(owned_by([0]), 2.0 + 4.0), (all_reduce(), 2.0 + 4 / 3)])
def test_the_backend_sends_nothing_to_a_rank_that_is_not_ready(transfer: Transfer, seconds: float, detail: str) -> None:
    """Rank 0 takes two seconds for backward, the others one; its notice that it is ready comes after that."""
    data = ClusterSpec.uniform(nodes=3, bandwidth=1e6).to_dict()
    data["nodes"][0]["speed"] = 0.5
    work = workload(1, ready=[1.0], backward_time=1.0)
    assert price(ClusterSpec.from_dict(data), [transfer], detail, work).step_time == pytest.approx(seconds, 1e-3)


@pytest.mark.parametrize(
    ("messages", "mib", "measured"), [(1, 0.01, 0.607), (1, 1.0, 0.588), (2, 1.0, 0.617), (1, 5.0, 0.958)]
)
def test_a_notice_behind_the_data_of_a_distant_site_does_not_travel_there(
    messages: int, mib: float, measured: float
) -> None:
    """Medians of native all-reduces on two emulated sites, 20 ms apart, beside other work on 1.7 cores."""
    cluster = resolve_cluster("two_sites_wan")
    work = Workload(
        name="flat",
        variables=tuple(Variable(name=f"p{number}", shape=(round(mib * 2**18),)) for number in range(messages)),
    )
    made = compile_plan(builders.all_reduce(work, cluster, bucket_bytes=1), work, cluster)
    found = Replay(work, cluster, Constants(cores=2, burst=128 * 1024)).predict(made, "frames").step_time
    assert found == pytest.approx(measured, rel=0.09)
