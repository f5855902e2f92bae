"""Plans drawn at random: a builder with random arguments, or any exact plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Group, Partition, SyncPlan, WeightedTree, builders
from lightning_autosync.plan.topologies import everywhere, find
from lightning_autosync.workload import Variable, Workload

BUILDERS = (
    "all_reduce",
    "byteps",
    "hierarchical",
    "packed_trees",
    "parallax",
    "partitioned_all_reduce",
    "partitioned_ps",
    "ps",
    "ps_load_balancing",
    "random_axis_partitioned_all_reduce",
    "uneven_partitioned_ps",
)
"""Builders of exact plans for any cluster; named here, so that a seed keeps its meaning when builders are added."""
_SMALLEST_BUCKET = 64 * 1024


def draw_buckets(random: Random, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """DDP's way: native all-reduces of buckets of a random size."""
    return builders.all_reduce(workload, cluster, **_arguments(builders.all_reduce, random, workload, cluster, False))


def draw_built(random: Random, workload: Workload, cluster: ClusterSpec, builder: str) -> SyncPlan:
    """The plan of a builder, each of its arguments drawn."""
    function = builders.BUILDERS[builder]
    return function(workload, cluster, **_arguments(function, random, workload, cluster, builder != "packed_trees"))


def draw_free(random: Random, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """An exact plan in which every aspect of every message is drawn by itself."""
    pending = [workload.variable(name) for name in workload.ready_order]
    limit = _bucket_bytes(random, workload)
    groups: list[Group] = []
    while pending:
        members = [pending.pop(0)]
        while pending and _fit(members, pending[0]) and sum(member.bytes for member in members) < limit:
            members.append(pending.pop(0))
        groups.append(_draw_group(random, f"group{len(groups)}", members, cluster.world_size))
    return SyncPlan(workload=workload.variables_fingerprint, world_size=cluster.world_size, groups=tuple(groups))


def _fit(members: list[Variable], following: Variable) -> bool:
    return {member.kind for member in (*members, following)} == {"dense"} and members[0].dtype == following.dtype


def _draw_group(random: Random, name: str, members: list[Variable], ranks: int) -> Group:
    served = random.random() < 0.4
    topology = find(random.choice(everywhere()))
    slices = members[0].shape[0] if members[0].kind != "dense" else sum(member.numel for member in members)
    shards = random.randint(1, min(slices, ranks)) if random.random() < 0.6 else 1
    weights = tuple(random.choice((0.5, 1.0, 2.0)) for _ in range(shards)) if random.random() < 0.4 else None
    drawn = [_draw_tree(random, ranks) for _ in range(random.randint(1, 3))] if random.random() < 0.3 else None
    return Group(
        name=name,
        variables=tuple(member.name for member in members),
        architecture="parameter_server" if served else "all_reduce",
        topology=topology.name,
        partition=Partition(shards=shards, weights=weights) if shards > 1 else None,
        placement=tuple(random.randrange(ranks) for _ in range(shards)) if served else None,
        trees=tuple(drawn) if drawn and topology.takes_trees else None,
        local_aggregation=topology.aggregates and not topology.two_level and random.random() < 0.3,
        priority=random.choice((0, 0, 0, -1, 1)),
    )


def _draw_tree(random: Random, ranks: int) -> WeightedTree:
    """Each rank but the first of a random order hangs on one before it."""
    order = random.sample(range(ranks), ranks)
    parents = [-1] * ranks
    for place in range(1, ranks):
        parents[order[place]] = order[random.randrange(place)]
    return WeightedTree(weight=random.choice((0.5, 1.0, 2.0)), parents=tuple(parents))


def _bucket_bytes(random: Random, workload: Workload) -> int:
    """Between a twentieth of the model and all of it, evenly in the logarithm."""
    return max(_SMALLEST_BUCKET, int(workload.bytes * 20 ** -random.random()))


def _arguments(
    builder: Callable[..., SyncPlan], random: Random, workload: Workload, cluster: ClusterSpec, topologies: bool
) -> dict[str, Any]:
    """A value for each argument that the builder takes and a draw makes sense for."""
    ranks = cluster.world_size
    draws: dict[str, Callable[[], Any]] = {
        "bucket_bytes": lambda: _bucket_bytes(random, workload),
        "first_bucket_bytes": lambda: _bucket_bytes(random, workload),
        "server": lambda: random.randrange(ranks),
        "servers": lambda: sorted(random.sample(range(ranks), random.randint(1, ranks))),
        "seed": lambda: random.randrange(1000),
    }
    if topologies:
        draws["topology"] = lambda: random.choice([name for name in everywhere() if not find(name).takes_trees])
    taken = inspect.signature(builder).parameters
    return {name: draw() for name, draw in draws.items() if name in taken}
