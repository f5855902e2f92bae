"""Cases of a validation: plans for workloads on clusters, drawn from a seed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, synchronization_rate
from lightning_autosync.documents import digest
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.measure.emulation.network import emulable
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.plan import Group, Partition, SyncPlan, WeightedTree, builders, compile_plan
from lightning_autosync.plan.topologies import everywhere, find
from lightning_autosync.replay import Replay
from lightning_autosync.replay.bound import changed_bytes
from lightning_autosync.workload import Variable, Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute

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
"""Builders of exact plans for any cluster. The list is fixed, so that new builders do not change a seed's cases."""
_SMALLEST_BUCKET = 64 * 1024


def draw_buckets(random: Random, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """DDP's method: native all-reduces of buckets of a random size."""
    return builders.all_reduce(workload, cluster, **_arguments(builders.all_reduce, random, workload, cluster, False))


def draw_built(random: Random, workload: Workload, cluster: ClusterSpec, builder: str) -> SyncPlan:
    """The plan of a builder with random arguments."""
    function = builders.find(builder)
    return function(workload, cluster, **_arguments(function, random, workload, cluster, builder != "packed_trees"))


def draw_free(random: Random, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    """An exact plan in which every aspect of every message is drawn independently."""
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
    """A random tree: ranks in random order, each a child of a random earlier rank."""
    order = random.sample(range(ranks), ranks)
    parents = [-1] * ranks
    for place in range(1, ranks):
        parents[order[place]] = order[random.randrange(place)]
    return WeightedTree(weight=random.choice((0.5, 1.0, 2.0)), parents=tuple(parents))


def _bucket_bytes(random: Random, workload: Workload) -> int:
    """A log-uniform number of bytes between a twentieth of the model and the whole model."""
    return max(_SMALLEST_BUCKET, int(workload.bytes * 20 ** -random.random()))


def _arguments(
    builder: Callable[..., SyncPlan], random: Random, workload: Workload, cluster: ClusterSpec, topologies: bool
) -> dict[str, Any]:
    """Random values for those parameters of the builder that can be drawn."""
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


_ARGUMENTS: dict[str, dict[str, Any]] = {"ncf": {"batch_size": 1024, "users": 8000, "items": 2000}}
"""Arguments of the catalogue's models. The recommender's tables fit into a worker, and a step touches many rows."""
_OTHERS = {"batch_size": 8}
_DRAWS = 200
"""Maximum number of draws until the cores can carry a plan."""
_LONGEST_STEP = 1 / 8
"""Maximum predicted time of a step, as a share of the time-out, within which several steps are measured."""


@dataclass(frozen=True)
class Case:
    """One step to measure and to predict.

    Attributes:
        cluster: cluster as emulated links show it.
        family: model of the catalogue.
        workload: workload of the scaled model.
        kind: how the plan was drawn: ``buckets``, the name of a builder, or ``free``.
        plan: an exact plan.
    """

    cluster: ClusterSpec
    family: str
    workload: Workload
    kind: str
    plan: SyncPlan

    @property
    def pair(self) -> str:
        """Name of cluster and family. The cases of one pair have the same workload."""
        return f"{self.cluster.name}, {self.family}"

    @cached_property
    def key(self) -> str:
        """Key of its measurement in files."""
        return digest([self.cluster.fingerprint, self.workload.fingerprint, self.plan.fingerprint])


def draw_cases(settings: ValidationSettings) -> list[Case]:
    """The cases of a seed, cluster by cluster.

    Raises:
        ClusterError: a cluster does not exist.
        WorkloadError: a model does not exist.
        DocumentError: no new plan for a workload was found that leaves enough cores free.
    """
    pairs = [(cluster, family) for cluster in settings.clusters for family in settings.families]
    cases: list[Case] = []
    for number, (name, family) in enumerate(pairs):
        count = settings.cases // len(pairs) + (number < settings.cases % len(pairs))
        random = Random(f"{settings.seed} {name} {family}")
        cluster = emulable(resolve_cluster(name), settings.fastest_link)
        if count:
            cases += _draw_pair(random, settings, cluster, family, count)
    return cases


def _draw_pair(
    random: Random, settings: ValidationSettings, cluster: ClusterSpec, family: str, count: int
) -> Iterator[Case]:
    least, most = settings.bound
    bound = math.exp(random.uniform(math.log(least), math.log(most)))
    compute = bound * math.exp(random.uniform(math.log(0.3), math.log(3.0)))
    full = catalogue.build(family, **_ARGUMENTS.get(family, _OTHERS))
    travels = sum(map(changed_bytes, full.variables))
    workload = with_compute(scaled(full, bound * synchronization_rate(cluster) / travels), compute)
    replay = Replay(workload, cluster, emulated_hosts(cores=settings.cores))
    drawn: set[str] = set()
    for kind in _kinds(random, count):
        case = Case(cluster, family, workload, *_draw_carried(random, kind, workload, cluster, replay, settings, drawn))
        drawn.add(case.plan.fingerprint)
        yield case


def _draw_carried(
    random: Random,
    kind: str,
    workload: Workload,
    cluster: ClusterSpec,
    replay: Replay,
    settings: ValidationSettings,
    drawn: Set[str],
) -> tuple[str, SyncPlan]:
    """A plan that can be measured, and how it was drawn. If a builder's plans do not fit, other builders are tried.

    Plans are skipped that the cores cannot carry, whose steps would take too long, and that are in ``drawn``, since
    their measurement would count twice.
    """
    for _ in range(_DRAWS):
        plan = _draw_plan(random, kind, workload, cluster)
        if plan.fingerprint not in drawn:
            predicted = replay.predict(compile_plan(plan, workload, cluster), detail="fluid")
            carried = predicted.cores is None or predicted.cores <= settings.most_cores
            if carried and predicted.step_time <= _LONGEST_STEP * settings.timeout:
                return kind, plan
        kind = random.choice(BUILDERS) if kind in BUILDERS else kind
    raise DocumentError(
        f"most_cores: none of {_DRAWS} drawn plans of '{workload.name}' on '{cluster.name}' is new, within "
        f"{settings.most_cores:g} and short enough for a timeout of {settings.timeout:g} s; give a larger most_cores, "
        "workloads with a longer `bound`, a longer timeout, or fewer cases"
    )


def _kinds(random: Random, count: int) -> list[str]:
    """Kinds of plans: in every seven one of DDP, four of different builders and two free ones."""
    others = random.sample(BUILDERS, len(BUILDERS))
    kinds = []
    for place in range(count):
        kinds.append(("buckets", "", "free", "", "", "free", "")[place % 7] or others[place % len(others)])
    return kinds


def _draw_plan(random: Random, kind: str, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    if kind == "buckets":
        return draw_buckets(random, workload, cluster)
    if kind == "free":
        return draw_free(random, workload, cluster)
    return draw_built(random, workload, cluster, kind)
