"""Samples whose truth is known: the replay, with hosts that cost more than the simulator is told."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.plan import Group, SyncPlan, compile_plan
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload

CONSTANTS = Constants(cores=2, accelerated=True)
TRUTH = CONSTANTS.model_copy(update={"frame_cost": 3e-4, "collective_cost": 2e-3, "host_cost": 3e-9})
"""Slow hosts: messages of trees and of collectives cost much, and not equally much."""


def star(*rates: int, name: str = "star") -> ClusterSpec:
    """Nodes on one switch, in Mbit/s."""
    return ClusterSpec.star(bandwidths=[f"{rate} Mbit/s" for rate in rates], latency="50 us", name=name)


def workload(name: str = "vgg", layers: int = 5, width: int = 160) -> Workload:
    """Some equal layers, ready one after the other from the last."""
    variables = [
        Variable(name=f"{name}{layer}.{part}", shape=shape, ready=0.004 * (layers - layer))
        for layer in range(layers)
        for part, shape in (("weight", (width, width)), ("bias", (width,)))
    ]
    return Workload(name=name, variables=tuple(variables), forward_time=0.01, backward_time=0.004 * layers)


def plan_of(workload: Workload, ranks: int, **aspects: object) -> SyncPlan:
    """All variables in one group of the given aspects."""
    names = tuple(variable.name for variable in workload.variables)
    group = Group.model_validate({"name": "all", "variables": names, **aspects})
    return SyncPlan(world_size=ranks, groups=(group,))


def measured(workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> list[Sample]:
    """Samples of plans as the truth has it, without noise."""
    truth = Replay(workload, cluster, TRUTH)
    times = [truth.predict(compile_plan(plan, workload, cluster)).step_time for plan in plans]
    return [Sample(workload, cluster, plan, (time,)) for plan, time in zip(plans, times, strict=True)]


def drawn(count: int, *contexts: tuple[Workload, ClusterSpec], semantics: Semantics = "compressed") -> list[Sample]:
    """So many samples of each workload and cluster."""
    samples = []
    for number, (model, cluster) in enumerate(contexts):
        space, random = PlanSpace(model, cluster, semantics, runs=2, lone=0), Random(number)
        samples += measured(model, cluster, [space.plan(space.draw(random)) for _ in range(count)])
    return samples
