"""The least step: by hand, and beside what the replay says of plans."""

from __future__ import annotations

from typing import Any

import pytest
from replay_cases import IDEAL, RATE, all_reduce, one_switch, price, tree, workload

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.replay import least_step, synchronization_bound
from lightning_autosync.replay.bound import Bound, arrival_times, departure_times
from lightning_autosync.workload import Variable, Workload

TABLE = Variable(name="table", shape=(100, 1), kind="row_sparse", rows=50.0)
ROWS = Workload(name="rows", variables=(TABLE,), optimizer_time=0.5)
UNEVEN = ClusterSpec.star(bandwidths=[1000.0, 100.0, 1000.0])


def test_forward_comes_first_and_backward_is_beside_the_wire() -> None:
    cluster = ClusterSpec.star(bandwidths=[1000.0] * 4)
    vector = Variable(name="a", shape=(250,), ready=0.1)
    dense = Workload(name="dense", variables=(vector,), forward_time=0.5, backward_time=0.4, optimizer_time=0.25)
    bound = least_step(dense, cluster, framing=1.1)
    assert bound.seconds == pytest.approx(0.5 + 0.1 + 1.1 * 1.5 + 0.25)
    assert bound.compute == pytest.approx(1.15)
    assert bound.exact
    assert least_step(dense.model_copy(update={"backward_time": 4.0}), cluster).seconds == pytest.approx(4.75)
    alone = Workload(name="alone", variables=(vector.model_copy(update={"ready": None}),))
    assert least_step(alone, cluster, 1.1).meaning == "synchronization (framing included) alone"


def test_rows_that_others_touch_must_come_in() -> None:
    times = {node.name: seconds for node, seconds in arrival_times(ROWS, UNEVEN)}
    assert times == pytest.approx({"node0": 0.3, "node1": 400 * 0.75 / 100, "node2": 0.3})
    assert least_step(ROWS, UNEVEN, framing=1.1).seconds == pytest.approx(1.1 * 3 + 0.5)
    burst = {node.name: seconds for node, seconds in arrival_times(ROWS, UNEVEN, 1.1, burst=30.0)}
    assert burst["node1"] == pytest.approx((330 - 30) / 100)


def test_rows_must_leave_the_nodes_that_touched_them() -> None:
    links = [{"a": name, "b": "switch", "bandwidth": 100.0, "reverse_bandwidth": 1e4} for name in "xy"]
    cluster = ClusterSpec.from_dict(
        {"format": ClusterSpec.FORMAT, "name": "slow up", "nodes": [{"name": n} for n in "xy"], "switches": ["switch"]}
        | {"links": links}
    )
    assert [seconds for _, seconds in departure_times(ROWS, cluster)] == pytest.approx([2.0, 2.0])
    assert [seconds for _, seconds in arrival_times(ROWS, cluster)] == pytest.approx([0.02, 0.02])
    assert least_step(ROWS, cluster).seconds == pytest.approx(2.0 + 0.5)


def test_no_row_travels_before_its_gradient_is_ready() -> None:
    dense = Variable(name="dense", shape=(25,), ready=0.5)
    work = Workload(name="late", variables=(TABLE.model_copy(update={"ready": 1.5}), dense), backward_time=2.0)
    times = {node.name: seconds for node, seconds in arrival_times(work, UNEVEN)}
    # 300 bytes of rows from 1.5 on, or 400 bytes in all from 0.5 on.
    assert times["node1"] == pytest.approx(max(1.5 + 300 / 100, 0.5 + 400 / 100))
    assert times["node0"] == pytest.approx(1.5 + 300 / 1000)


def test_rows_that_a_fast_node_sends_and_a_slow_one_waits_for() -> None:
    data = UNEVEN.to_dict()
    data["nodes"][0]["speed"], data["nodes"][1]["speed"] = 2.0, 0.5
    work = ROWS.model_copy(update={"forward_time": 1.0})
    assert least_step(work, ClusterSpec.from_dict(data)).seconds == pytest.approx(1 / 2 + 3 + 0.5 / 0.5)


def test_a_table_without_rows_adds_nothing() -> None:
    empty = Variable(name="empty", shape=(0, 8), kind="sparse", rows=0.0)
    both = Workload(name="both", variables=(TABLE, empty), optimizer_time=0.5)
    assert least_step(both, UNEVEN) == least_step(ROWS, UNEVEN)


def test_of_a_table_only_what_changed_is_synchronized() -> None:
    dense = Variable(name="dense", shape=(25,))
    both = Workload(name="both", variables=(TABLE, dense))
    assert synchronization_bound(both, ClusterSpec.uniform(2, bandwidth=100.0)) == pytest.approx(2.0 + 1.0)


def test_of_a_large_cluster_it_is_a_cut_bound() -> None:
    cluster = ClusterSpec.racks(racks=2, nodes_per_rack=40, bandwidth=RATE, uplink=RATE)
    assert least_step(workload(1), cluster, 1.1).exact  # ranks are alike
    links = [link.model_copy(update={"bandwidth": RATE + n}) for n, link in enumerate(cluster.links)]
    bound = least_step(workload(1), cluster.model_copy(update={"links": tuple(links)}), 1.1)
    assert not bound.exact
    assert bound.meaning.startswith("synchronization (framing included, a cut bound)")


@pytest.mark.parametrize("detail", ["frames", "fluid"])
@pytest.mark.parametrize("forward", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("transfers", [[tree([-1, 0])], [tree([-1, 0], 20)] * 2, [all_reduce()] * 2])
def test_no_step_over_rested_links_is_priced_below_the_bound(transfers: list[Any], forward: float, detail: str) -> None:
    constants = IDEAL.model_copy(update={"burst": 0.25e6})
    work = workload(len(transfers), forward_time=forward)
    seconds = price(one_switch(2), transfers, detail, work, constants).step_time
    assert seconds >= least_step(work, one_switch(2), burst=constants.burst).seconds * (1 - 1e-6)
    if forward == 1.0:  # a rest in which buckets fill: bytes over rate, by itself, bounds nothing
        assert seconds < least_step(work, one_switch(2)).seconds


def test_the_links_of_the_bound_are_named_the_largest_first() -> None:
    binding = {"a > b": 0.7, "b > c": 0.2, "c > d": 0.1}
    bound = Bound(1.0, 0.0, "synchronization alone", binding=binding)
    assert bound.binding_lines(3) == ["a > b (70%)", "b > c (20%)", "c > d (10%)"]
    assert bound.binding_lines(1) == ["a > b (70%)", "2 more"]
