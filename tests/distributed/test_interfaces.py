"""Trees over several network interfaces: sums on live ranks, over the loopback interface and over emulated links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import interface_calls
import pytest
from clusters import two_interfaces

from lightning_autosync.cluster import ClusterSpec, resolve_cluster
from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.timelines import bytes_on_links
from lightning_autosync.measure.workers import LaunchError, WorkerPool
from lightning_autosync.plan import SyncPlan

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

CHAIN, STAR = (1, -1, 1), (-1, 0, 0)
HERE = [("127.0.0.1", "127.0.0.2")] * 3
"""Addresses of this machine on Linux, for each rank and interface."""


def plan_of(*interfaces: int, variable: str = "weight") -> dict[str, Any]:
    """Two trees, each over an interface."""
    shapes = zip((CHAIN, STAR), interfaces, strict=True)
    trees = [{"weight": 1, "parents": parents, "interface": interface} for parents, interface in shapes]
    group = {"name": "g", "variables": [variable], "topology": "packed", "trees": trees}
    return SyncPlan.from_dict({"format": SyncPlan.FORMAT, "world_size": 3, "groups": [group]}).to_dict()


def here(addresses: list[tuple[str, str]] = HERE) -> dict[str, Any]:
    return two_interfaces([1e8] * 3, [1e8] * 3, addresses).to_dict()


def test_sums_have_the_same_bits_over_any_interfaces(pool) -> None:
    found = [
        pool.run(interface_calls.summed, plan=plan_of(*interfaces), cluster=here())[:3]
        for interfaces in ((0, 0), (0, 1), (1, 1))
    ]
    for answers in found:
        for sums, sent in answers:
            assert sums == found[0][0][0]  # on all ranks, and as over one interface
            assert sent >= 3 * 4 * interface_calls.ELEMENTS / 2


def test_rows_are_summed_over_any_interfaces(pool) -> None:
    plan = plan_of(0, 1)
    assert max(pool.run(interface_calls.rows_summed, plan=plan, cluster=here())[:3]) < 1e-6


def test_interfaces_without_an_address_are_refused_on_every_rank(pool) -> None:
    data = here()
    del data["nodes"][1]["interfaces"][1]["address"]
    found = pool.run(interface_calls.refused, plan=plan_of(0, 1), cluster=data)[:3]
    told = "PlanError: cluster 'two_interfaces': nodes[1].interfaces[1].address: missing, also in"
    assert [error[: len(told)] for error in found] == [told] * 3
    assert pool.run(interface_calls.refused, plan=plan_of(0, 0), cluster=data)[:3] == ["no error"] * 3


@pytest.mark.parametrize("told", ["", "127.0.0.1,"])
def test_addresses_that_one_rank_does_not_know_are_refused_on_every_rank(pool, told: str) -> None:
    """The environment tells them, on two ranks of three only."""
    cluster, addresses = two_interfaces([1e8] * 3, [1e8] * 3).to_dict(), ["127.0.0.1, 127.0.0.2", told, "::1,127.0.0.3"]
    found = pool.run(interface_calls.refused_with, addresses=addresses, plan=plan_of(0, 1), cluster=cluster)[:3]
    told = "PlanError: cluster 'two_interfaces': nodes[1].interfaces[1].address: missing"
    assert [error[: len(told)] for error in found] == [told] * 3
    addresses[1] = "127.0.0.1, 127.0.0.1"
    found = pool.run(interface_calls.refused_with, addresses=addresses, plan=plan_of(0, 1), cluster=cluster)[:3]
    assert found == ["no error"] * 3


def test_an_address_of_another_host_is_refused_with_its_interface(pool) -> None:
    foreign = here([("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "203.0.113.7"), ("127.0.0.1", "127.0.0.2")])
    for error in pool.run(interface_calls.refused, plan=plan_of(0, 1), cluster=foreign)[:3]:
        assert "rank 1 cannot listen for its peers over interface 1: 203.0.113.7" in error


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_both_emulated_interfaces_carry_their_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the chain 0 - 1 - 2 carries half of the data each way, over the first interface or the second."""
    monkeypatch.setattr(forked.Popen, "enters_namespaces", True)
    half, steps = 4 * (interface_calls.ELEMENTS // 2), 16
    cluster = two_interfaces([2.5e7] * 3, [2.5e7] * 3)
    with (
        EmulatedLaunch(cluster) as launch,
        WorkerPool(3, launch, extra_paths=[Path(__file__).parent], timeout=120) as live,
    ):
        traffic = {}
        for interfaces in ((0, 1), (1, 0)):
            before = bytes_on_links(launch)
            answers = live.run(
                interface_calls.summed, plan=plan_of(*interfaces), cluster=cluster.to_dict(), steps=steps
            )
            assert answers[0][0] == answers[1][0] == answers[2][0]
            traffic[interfaces] = {name: count - before[name] for name, count in bytes_on_links(launch).items()}
    for interfaces, counts in traffic.items():
        chain, star = (f"s{interface}" for interface in interfaces)
        # The middle of the chain and of the star sends to two ranks, the ends to one.
        for name, switch, copies in [
            ("n0", chain, 1),
            ("n1", chain, 2),
            ("n0", star, 2),
            ("n1", star, 1),
            ("n2", star, 1),
        ]:
            # Besides, ranks agree on the schedule, over the first interface.
            assert counts[f"{name} > {switch}"] == pytest.approx(steps * copies * half, rel=0.15)


@pytest.mark.root
@pytest.mark.skipif(bool(UNABLE), reason=UNABLE)
def test_the_launch_tells_ranks_their_addresses() -> None:
    cluster: ClusterSpec = resolve_cluster("two_interfaces")
    with EmulatedLaunch(cluster) as launch:
        told = [launch.environment(rank)["AUTOSYNC_ADDRESSES"].split(",") for rank in range(4)]
    assert len({address for addresses in told for address in addresses}) == 8
