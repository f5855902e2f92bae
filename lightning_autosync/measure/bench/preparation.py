"""From settings to what workers set up. Wrong contenders are reported before any worker starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, get_args

import torch

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import allowed_names
from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.hybrid.plan import HybridPlan
from lightning_autosync.hybrid.validation import check_plan
from lightning_autosync.measure.bench.settings import BenchSettings, ContenderSettings, DDPOptions, Exactness
from lightning_autosync.measure.conditions import usable_cores
from lightning_autosync.measure.launches.settings import ClusterSettings
from lightning_autosync.measure.models.model import MIB, Embeddings, Model
from lightning_autosync.plan import SyncPlan, builders, codecs, compile_plan
from lightning_autosync.workload import Workload


@dataclass(frozen=True)
class Preparation:
    """What is set up in workers.

    Attributes:
        cluster: the machines, scaled and in the chosen rank order; as emulated links show them, if links are emulated.
        workload: workload of the model, with row-sparse gradients of those tables of which jobs send rows.
        orders: by contender, the arguments of `lightning_autosync.measure.replica_calls.set_up` without the name.
        classes: exactness of each contender.
        reasons: by contender, why a function chose its plan, if it returned a reason.
    """

    cluster: ClusterSpec
    workload: Workload
    orders: dict[str, dict[str, Any]]
    classes: dict[str, Exactness]
    reasons: dict[str, str]


def prepare(settings: BenchSettings) -> Preparation:
    """Build every contender's plan and check that it compiles.

    Raises:
        DocumentError: a contender, the cluster or a plan is wrong; the message names it.
    """
    cluster = make_cluster(settings, settings.ranks)
    if settings.emulated:
        cluster = cluster.as_emulated()
    workloads = {kind: settings.model.workload(kind) for kind in get_args(Embeddings)}
    made = {
        name: _prepared(name, contender, settings, cluster, workloads[contender.embeddings])
        for name, contender in settings.all_contenders().items()
    }
    return Preparation(
        cluster=cluster,
        workload=workloads["rows"],
        orders={name: item.order for name, item in made.items()},
        classes={name: item.exactness for name, item in made.items()},
        reasons={name: item.reason for name, item in made.items() if item.reason},
    )


def make_cluster(settings: ClusterSettings, ranks: int | None) -> ClusterSpec:
    """The cluster of the settings, scaled and with its ranks in the chosen order; else one machine with ``ranks``.

    Its addresses are left out where all ranks run on this machine, which does not have them.
    """
    if settings.cluster is None:
        machine = {"name": "machine", "devices": ranks or 2}
        return ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, "name": "one_machine", "nodes": [machine]})
    cluster = ClusterSpec.from_dict(settings.cluster, source="cluster")
    if settings.launch.kind in ("local", "emulated"):
        cluster = cluster.without_addresses()
    if settings.cluster_fastest is not None:
        cluster.require_measured()
        fastest = max(cluster.rates, default=settings.cluster_fastest)
        cluster = cluster.scaled(settings.cluster_fastest / fastest)
    else:
        cluster = cluster.scaled(settings.cluster_scale)
    if ranks not in (None, cluster.world_size):
        raise DocumentError(f"ranks: {ranks} requested, but cluster '{cluster.name}' has {cluster.world_size}")
    return cluster if settings.rank_order == "natural" else interleaved(cluster)


def interleaved(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with ranks that alternate between the first and the second half of its devices."""
    names = [cluster.nodes[node].name for node in cluster.rank_nodes]
    half = (len(names) + 1) // 2
    return cluster.with_rank_order([names[rank // 2 + half * (rank % 2)] for rank in range(len(names))])


@dataclass(frozen=True)
class _Prepared:
    order: dict[str, Any]
    exactness: Exactness
    reason: str = ""


def _prepared(
    name: str, contender: ContenderSettings, settings: BenchSettings, cluster: ClusterSpec, workload: Workload
) -> _Prepared:
    order = {
        "model": settings.model.model_dump(),
        "sparse": contender.embeddings == "sparse",
        "cluster": cluster.to_dict(),
        "timeout": settings.exchange_timeout,
        "device": settings.device,
    }
    try:
        if contender.ddp is not None:
            _check_hook(contender.ddp, workload)
            return _Prepared({**order, "ddp": contender.ddp.model_dump()}, contender.ddp.exactness)
        if contender.plan is not None and HybridPlan.is_in(contender.plan):
            hybrid = _hybrid_plan(contender.plan, settings.model, cluster)
            if contender.overlap:
                raise DocumentError("overlap: hybrid plans have none; allowed: false")
            if contender.gradient_as_bucket_view:
                raise DocumentError("gradient_as_bucket_view: hybrid plans have none; allowed: false")
            return _Prepared({**order, "hybrid": hybrid.to_dict()}, plan_class(hybrid))
        kind = settings.launch.kind
        cores = usable_cores() if kind in ("local", "emulated") and settings.device == "cpu" else None
        plan, reason = _plan(contender, workload, cluster, {"shares_cores": kind == "local", "cores": cores})
        compile_plan(plan, workload, cluster, contender.plan or "plan")
    except AutoSyncError as error:
        raise DocumentError(f"contenders.{name}: {error}") from None
    documents = {"plan": plan.to_dict(), "workload": workload.to_dict()}
    options = {"overlap": contender.overlap, "views": contender.gradient_as_bucket_view}
    return _Prepared({**order, **documents, **options}, plan_class(plan), reason)


def _hybrid_plan(path: str, model: Model, cluster: ClusterSpec) -> HybridPlan:
    """Load a plan that splits operators, and check it against the model's module."""
    plan = HybridPlan.load(path)
    with torch.device("meta"):
        module = model.module()
    check_plan(plan, module, cluster.world_size, path)
    return plan


def plan_class(plan: SyncPlan | HybridPlan) -> Exactness:
    """How exact a plan is."""
    if isinstance(plan, HybridPlan):
        return "exact" if isinstance(plan.gradients, str) else plan_class(plan.gradients)
    if plan.semantics == "exact":
        return "exact"
    casts = all(
        group.compressor.kind == "none" or codecs.find(group.compressor.kind).sums == "cast" for group in plan.groups
    )
    return "low precision" if plan.semantics == "compressed" and casts else "relaxed or lossy"


def _check_hook(options: DDPOptions, workload: Workload) -> None:
    """Refuse PowerSGD with several buckets, since these make it hang or abort on gloo."""
    if options.hook != "powersgd":
        return
    needed = math.ceil(workload.bytes / MIB) + 1
    if options.bucket_cap_mb == "default" or options.bucket_cap_mb < needed:
        raise DocumentError(f"ddp.bucket_cap_mb: on gloo, powersgd works with one bucket only; use {needed} or more")


def _plan(
    contender: ContenderSettings, workload: Workload, cluster: ClusterSpec, known: Mapping[str, Any]
) -> tuple[SyncPlan, str]:
    """The plan and the reason for it (empty if none). Functions get those of the ``known`` arguments that they name."""
    if contender.plan is not None:
        return SyncPlan.load(contender.plan), ""
    assert contender.builder is not None
    build = _builder(contender.builder)
    allowed = _arguments(build)
    for argument in contender.arguments:
        if allowed is not None and argument not in allowed:
            told = allowed_names(argument, allowed)
            raise DocumentError(f"builder '{contender.builder}' has no argument '{argument}'; {told}")
    given = {name: value for name, value in known.items() if name in (allowed or ()) and value is not None}
    try:
        made = build(workload, cluster, **given | contender.arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, AutoSyncError):
            raise
        raise DocumentError(f"builder '{contender.builder}': {' '.join(str(error).split())}") from None
    plan, reason = made if isinstance(made, tuple) else (made, "")
    if not isinstance(plan, SyncPlan):
        raise DocumentError(f"builder '{contender.builder}': it returned {type(plan).__name__}, not a SyncPlan")
    return plan, reason


def _builder(name: str) -> Callable[..., Any]:
    module, separator, function = name.partition(":")
    if not separator:
        return partial(builders.build, name)
    try:
        build: Callable[..., Any] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DocumentError(f"builder '{name}': {error}") from None
    return build


def _arguments(build: Callable[..., Any]) -> list[str] | None:
    """Names of the parameters after workload and cluster; None for this package's builders, which check themselves."""
    return None if isinstance(build, partial) else list(inspect.signature(build).parameters)[2:]
