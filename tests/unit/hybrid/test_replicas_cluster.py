"""The cluster as a set of replicas sees it."""

from __future__ import annotations

from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.reduction import replicas_cluster


def test_replicas_share_the_links_of_the_first_interface() -> None:
    """Both sets of two replicas use a link of their own to the switch, and none of the second interface."""
    plan = HybridPlan(mesh=(2, 2), layers=(LayerPlan(module="up", signature=("col", "rep")),))
    found, known = replicas_cluster(plan, (0,), (0, 2), resolve_cluster("two_interfaces"))
    assert known
    assert [(link.a, link.b, link.bandwidth) for link in found.links] == [
        ("node0", "left", 125e6),
        ("node2", "left", 125e6),
    ]
    assert (found.interface_count, found.switches) == (1, ("left",))
