"""From settings to orders for the workers; what is wrong with a contender shows before any worker starts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_autosync.bench.models import Model
from lightning_autosync.bench.settings import Contender, Embeddings, Settings
from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import AutoSyncError, DocumentError
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.workload import Workload, describe


@dataclass(frozen=True)
class Preparation:
    """What workers are told.

    Attributes:
        cluster: the machines, scaled and ordered.
        size: bytes of all dense gradients.
        orders: for each contender, the arguments of :func:`lightning_autosync.bench.contenders.set_up`.
    """

    cluster: ClusterSpec
    size: int
    orders: dict[str, dict[str, Any]]


def prepare(settings: Settings) -> Preparation:
    """Make every contender's plan and check that it compiles.

    Raises:
        DocumentError: (or a subclass) a contender, the cluster or a plan is wrong; the message names it.
    """
    cluster = make_cluster(settings)
    orders = {name: _order(name, contender, settings, cluster) for name, contender in settings.all_contenders().items()}
    return Preparation(cluster, make_workload(settings.model, "dense").bytes, orders)


def make_cluster(settings: Settings) -> ClusterSpec:
    """The cluster of the settings, scaled and with its ranks in order."""
    if settings.cluster is None:
        return ClusterSpec.from_dict(
            {
                "format": ClusterSpec.FORMAT,
                "name": "one_machine",
                "nodes": [{"name": "machine", "devices": settings.ranks or 2}],
            }
        )
    cluster = ClusterSpec.from_dict(settings.cluster, source="cluster").scaled(settings.cluster_scale)
    if settings.ranks not in (None, cluster.world_size):
        raise DocumentError(f"ranks: {settings.ranks} asked for, but cluster '{cluster.name}' has {cluster.world_size}")
    return cluster if settings.rank_order == "natural" else interleaved(cluster)


def interleaved(cluster: ClusterSpec) -> ClusterSpec:
    """The ranks taken in turn from the first and the second half of them."""
    names = [cluster.nodes[node].name for node in cluster.rank_nodes]
    half = (len(names) + 1) // 2
    return cluster.with_rank_order([names[rank // 2 + half * (rank % 2)] for rank in range(len(names))])


def make_workload(model: Model, embeddings: Embeddings) -> Workload:
    """What the model asks of synchronization; no memory is spent on its parameters."""
    with torch.device("meta"):
        module = model.module(sparse=embeddings == "sparse")
    workload = describe(module, name=type(model).__name__.lower())
    if embeddings != "rows":
        return workload
    tables = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    return workload.model_copy(
        update={
            "variables": tuple(
                variable.model_copy(update={"kind": "row_sparse"}) if variable.name in tables else variable
                for variable in workload.variables
            )
        }
    )


def _order(name: str, contender: Contender, settings: Settings, cluster: ClusterSpec) -> dict[str, Any]:
    order = {
        "name": name,
        "model": settings.model.model_dump(),
        "sparse": contender.embeddings == "sparse",
        "cluster": cluster.to_dict(),
        "timeout": settings.timeout,
    }
    if contender.ddp is not None:
        return {**order, "ddp": contender.ddp.model_dump()}
    workload = make_workload(settings.model, contender.embeddings)
    where = f"contenders.{name}"
    try:
        plan = _plan(contender, workload, cluster)
        compile_plan(plan, workload, cluster)
    except AutoSyncError as error:
        raise DocumentError(f"{where}: {error}") from None
    return {**order, "plan": plan.to_dict(), "workload": workload.to_dict()}


def _plan(contender: Contender, workload: Workload, cluster: ClusterSpec) -> SyncPlan:
    if contender.plan is not None:
        return SyncPlan.load(contender.plan)
    assert contender.builder is not None
    if contender.builder in builders.BUILDERS:
        _check_arguments(contender.builder, contender.arguments)
    try:
        return builders.build(contender.builder, workload, cluster, **contender.arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, AutoSyncError):
            raise
        raise DocumentError(f"builder '{contender.builder}': {' '.join(str(error).split())}") from None


def _check_arguments(builder: str, arguments: dict[str, Any]) -> None:
    parameters = inspect.signature(builders.BUILDERS[builder]).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in arguments:
        if name not in allowed:
            raise DocumentError(f"builder '{builder}' has no argument '{name}'; it takes {', '.join(allowed)}")
