"""Trees that run over one of several network interfaces: plan files, schedules and paces."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from clusters import two_interfaces

from lightning_autosync.cluster import ClusterSpec, LinkGraph, resolve_cluster
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Schedule, SyncPlan, TreeTransfer, builders, compile_plan
from lightning_autosync.plan.pacing import HEADROOM, PAYLOAD_SHARE, pipeline_stretches, sending_needs
from lightning_autosync.workload import Variable, Workload

WORK = Workload(name="one", variables=(Variable(name="v", shape=(4_000_000,)),))
STAR, CHAIN = (-1, 0, 0, 0), (1, -1, 1, 2)


def plan_of(*trees: dict[str, Any]) -> SyncPlan:
    group = {"name": "g", "variables": ["v"], "topology": "packed", "trees": list(trees)}
    return SyncPlan.from_dict({"format": SyncPlan.FORMAT, "world_size": 4, "groups": [group]})


def transfers(schedule: Schedule) -> list[TreeTransfer]:
    return [one for one in schedule.messages[0].rounds[0].transfers if isinstance(one, TreeTransfer)]


def test_a_tree_runs_over_its_interface() -> None:
    plan = plan_of({"weight": 3, "parents": STAR}, {"weight": 1, "parents": CHAIN, "interface": 1})
    made = compile_plan(plan, WORK, resolve_cluster("two_interfaces"))
    assert [(one.reduce.interface, one.broadcast.interface) for one in transfers(made)] == [(0, 0), (1, 1)]
    assert made.interfaces == (0, 1)
    assert made.tree_edges(0) == {(0, 1), (0, 2), (0, 3)}
    assert made.tree_edges(1) == {(0, 1), (1, 2), (2, 3)}
    assert made.tree_edges() == made.tree_edges(0) | made.tree_edges(1)
    assert "2 trees over 2 interfaces" in " ".join(plan.describe().replace("│", " ").split())


def test_trees_of_servers_keep_their_interface() -> None:
    tree = {"weight": 1, "parents": CHAIN, "interface": 1}
    data = plan_of(tree).to_dict()
    data["groups"][0] |= {"architecture": "parameter_server", "placement": [3]}
    (only,) = transfers(compile_plan(SyncPlan.from_dict(data), WORK, resolve_cluster("two_interfaces")))
    assert (only.root, only.reduce.interface, only.broadcast.interface) == (3, 1, 1)


def test_the_first_interface_need_not_be_named() -> None:
    absent, named = (plan_of({"weight": 1, "parents": STAR, **more}) for more in ({}, {"interface": 0}))
    assert absent == named
    assert absent.fingerprint == named.fingerprint
    assert "interface" not in named.to_dict()["groups"][0]["trees"][0]
    other = plan_of({"weight": 1, "parents": STAR, "interface": 1})
    assert other.fingerprint != absent.fingerprint
    assert SyncPlan.from_dict(other.to_dict()) == other
    jsonschema.validate(other.to_dict(), SyncPlan.json_schema())
    data = other.to_dict()
    data["groups"][0]["trees"][0]["interface"] = "eth1"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SyncPlan.json_schema())


def test_an_interface_that_a_node_lacks_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"groups\[0\]\.trees\[0\]\.interface: Input should be greater than or equal to 0"
    ):
        plan_of({"weight": 1, "parents": STAR, "interface": -1})
    plan = plan_of({"weight": 1, "parents": STAR}, {"weight": 1, "parents": STAR, "interface": 1})
    told = (
        r"groups\[0\] 'g': trees\[1\]\.interface: node 'node0' of cluster 'uniform' has no interface 1; allowed: 0 to 0"
    )
    with pytest.raises(PlanError, match=told):
        compile_plan(plan, WORK, ClusterSpec.uniform(4))


def test_the_builder_uses_both_interfaces_in_proportion() -> None:
    cluster = two_interfaces([3e7] * 4, [1e7] * 4)
    made = compile_plan(builders.packed_trees(WORK, cluster), WORK, cluster)
    elements = [0, 0]
    for one in transfers(made):
        elements[one.reduce.interface] += one.stop - one.start
    assert elements[0] / sum(elements) == pytest.approx(0.75, abs=0.02)


def test_connections_are_paced_by_what_they_share_with_those_of_other_interfaces() -> None:
    """By hand: both trees are stars around rank 0; 3/4 of each message goes over one interface, 1/4 over the other."""
    plan = plan_of({"weight": 3, "parents": STAR}, {"weight": 1, "parents": STAR, "interface": 1})
    cluster = two_interfaces([1e7] * 4, [4e7] * 4)
    made, links = compile_plan(plan, WORK, cluster), LinkGraph(cluster)
    for interface, rate in ((0, 1e7), (1, 4e7)):
        # Each of the root's three connections has a third of its link, but they share no link with the other interface.
        needs = sending_needs(made, links, 0, interface)
        stretches = pipeline_stretches(made, 0, interface)
        wire = {peer: (need.pace or 0.0) / PAYLOAD_SHARE / HEADROOM / stretches[peer] for peer, need in needs.items()}
        assert wire == {peer: pytest.approx(rate / 3) for peer in (1, 2, 3)}
