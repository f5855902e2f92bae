"""Cases: which plan, for which workload, on which cluster; drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, synchronization_rate
from lightning_autosync.documents import digest
from lightning_autosync.errors import DocumentError
from lightning_autosync.lab.validation.plans import BUILDERS, draw_buckets, draw_built, draw_free
from lightning_autosync.lab.validation.settings import Settings
from lightning_autosync.measure.emulation.emulated_clusters import emulable
from lightning_autosync.measure.hosts import shared_hosts
from lightning_autosync.plan import SyncPlan, compile_plan
from lightning_autosync.replay import Replay
from lightning_autosync.replay.bound import changed_bytes
from lightning_autosync.workload import Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute

_ARGUMENTS: dict[str, dict[str, Any]] = {"ncf": {"batch_size": 1024, "users": 8000, "items": 2000}}
"""Of the catalogue's models: a recommender's step touches a good part of tables that a worker can hold."""
_OTHERS = {"batch_size": 8}
_DRAWS = 200
"""How often a plan is drawn anew until the cores can carry it."""


@dataclass(frozen=True)
class Case:
    """One step to measure and to price.

    Attributes:
        cluster: the machines, as emulated.
        family: the model of the catalogue.
        workload: the model, scaled down.
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
        """Cluster and family; the cases of one pair have the same workload too."""
        return f"{self.cluster.name}, {self.family}"

    @cached_property
    def key(self) -> str:
        """A name under which a measurement is found again."""
        return digest([self.cluster.fingerprint, self.workload.fingerprint, self.plan.fingerprint])


def draw_cases(settings: Settings) -> list[Case]:
    """The cases of a seed, cluster by cluster.

    Raises:
        ClusterError: there is no such cluster.
        WorkloadError: there is no such model.
        DocumentError: the cores of this machine can carry no plan of a workload.
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


def _draw_pair(random: Random, settings: Settings, cluster: ClusterSpec, family: str, count: int) -> Iterator[Case]:
    least, most = settings.bound
    bound = math.exp(random.uniform(math.log(least), math.log(most)))
    compute = bound * math.exp(random.uniform(math.log(0.3), math.log(3.0)))
    full = catalogue.build(family, **_ARGUMENTS.get(family, _OTHERS))
    travels = sum(map(changed_bytes, full.variables))
    workload = with_compute(scaled(full, bound * synchronization_rate(cluster) / travels), compute)
    replay = Replay(workload, cluster, shared_hosts(cores=settings.cores))
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
    settings: Settings,
    drawn: Set[str],
) -> tuple[str, SyncPlan]:
    """A plan that this machine's cores can carry, and how it was drawn: if need be by another builder.

    It is none of those ``drawn`` already, which would be one measurement counted twice.
    """
    for _ in range(_DRAWS):
        plan = _draw_plan(random, kind, workload, cluster)
        if plan.fingerprint not in drawn:
            busy = replay.predict(compile_plan(plan, workload, cluster), detail="fluid").cores
            if busy is None or busy <= settings.most_cores:
                return kind, plan
        kind = random.choice(BUILDERS) if kind in BUILDERS else kind
    raise DocumentError(
        f"most_cores: none of {_DRAWS} plans of '{workload.name}' on '{cluster.name}' leaves the cores that free "
        "and is new; allowed: a larger share, workloads with a longer `bound`, or fewer cases"
    )


def _kinds(random: Random, count: int) -> list[str]:
    """Of seven plans one is DDP's, four are of different builders, and two are free."""
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
