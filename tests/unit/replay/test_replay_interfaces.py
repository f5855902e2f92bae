"""The replay of trees over several network interfaces."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from clusters import two_interfaces
from replay_cases import ELEMENTS, IDEAL, RATE, schedule, workload

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, synchronization_time
from lightning_autosync.plan import Tree, TreeTransfer, builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.network import NetworkArrays
from lightning_autosync.workload import Variable, Workload

DETAILS = ["frames", "fluid"]
LARGE = Workload(name="large", variables=tuple(Variable(name=f"v{number}", shape=(2_000_000,)) for number in range(4)))


def halves(cluster: ClusterSpec, interfaces: tuple[int, int], detail: Any) -> float:
    """Seconds in which two messages of a megabyte are summed at rank 0, each over an interface."""
    pieces = ELEMENTS // 50
    trees = [Tree((-1, 0), interface) for interface in interfaces]
    made = schedule(2, [TreeTransfer(0, ELEMENTS, tree, tree, pieces) for tree in trees])
    return Replay(workload(2), cluster, IDEAL).predict(made, detail).step_time


@pytest.mark.parametrize("trunk", [None, RATE])
def test_routes_over_each_interface_are_those_of_the_link_graph(trunk: float | None) -> None:
    network = NetworkArrays(two_interfaces([RATE] * 3, [2 * RATE] * 3, trunk=trunk), IDEAL)
    network.find_routes(numpy.arange(network.pairs)[::-1])
    known = network.routes
    for (row, target), route in numpy.ndenumerate(known.between):
        interface, source = divmod(row, network.ranks)
        hops = known.hops[known.starts[route] : known.starts[route + 1]]
        assert tuple(hops.tolist()) == network.link_graph.route(source, target, interface)


@pytest.mark.parametrize("detail", DETAILS)
def test_messages_over_two_interfaces_share_no_link(detail: str) -> None:
    """By hand: a link takes a second for each message up, and in the same second carries its sums down."""
    cluster = two_interfaces([RATE] * 2, [RATE / 2] * 2)
    assert halves(cluster, (0, 0), detail) == pytest.approx(2.0, rel=0.05)
    assert halves(cluster, (1, 1), detail) == pytest.approx(4.0, rel=0.05)
    assert halves(cluster, (0, 1), detail) == pytest.approx(2.0, rel=0.05)  # as long as the slow one takes alone


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("constants", [IDEAL, Constants(cores=2, burst=128 * 1024)], ids=["ideal", "emulated"])
def test_a_second_interface_nearly_doubles_the_speed_of_packed_trees(detail: Any, constants: Constants) -> None:
    both = resolve_cluster("two_interfaces").scaled(0.1)
    one = ClusterSpec.uniform(4, bandwidth=12.5e6)
    seconds = [
        Replay(LARGE, cluster, constants)
        .predict(compile_plan(builders.packed_trees(LARGE, cluster), LARGE, cluster), detail)
        .step_time
        for cluster in (one, both)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=0.06)
    least = synchronization_time(both, LARGE.bytes)
    if constants is IDEAL:
        assert least <= seconds[1] <= 1.05 * least


def test_ranks_of_different_speeds_use_both_interfaces() -> None:
    """The fluid replay then divides stages by class, and connections with a pace are channels."""
    data = two_interfaces([1.25e7] * 4, [1.25e7] * 4).to_dict()
    data["nodes"][3]["speed"] = 0.5
    cluster = ClusterSpec.from_dict(data)
    work = LARGE.model_copy(update={"forward_time": 0.05, "backward_time": 0.1})
    made = compile_plan(builders.packed_trees(work, cluster), work, cluster)
    replay = Replay(work, cluster, IDEAL)
    assert replay.predict(made, "fluid").step_time == pytest.approx(replay.predict(made, "frames").step_time, rel=0.1)
