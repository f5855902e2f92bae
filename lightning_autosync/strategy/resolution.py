"""Workload, cluster, plan and schedule of a module, from the strategy's settings."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import counted
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.exchanges.shared_memory import sharing_fault
from lightning_autosync.engine.replicas import require_equal_structures
from lightning_autosync.engine.resources import connected_interfaces
from lightning_autosync.errors import ClusterError, OpeningError, PlanError
from lightning_autosync.plan import Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.ports import ADDRESSES
from lightning_autosync.strategy.agreement import agree
from lightning_autosync.strategy.choice import choose_plan
from lightning_autosync.strategy.settings import StrategySettings, check_semantics, reason_of_given
from lightning_autosync.strategy.tuning.live import Alternative
from lightning_autosync.strategy.tuning.proposals import Proposals
from lightning_autosync.workload import Workload, describe, large_tables


@dataclass(frozen=True)
class Resolution:
    """The result for one module.

    Attributes:
        cluster: the nodes and links of the job.
        schedule: the compiled plan; None if the plan has none.
        reason: why the plan was chosen.
        alternatives: plans that may be tried while training, the first of which is ``plan``; empty if none may.
    """

    workload: Workload
    cluster: ClusterSpec
    plan: SyncPlan
    schedule: Schedule | None
    reason: str
    alternatives: Sequence[Alternative] = ()


def resolve_together(
    settings: StrategySettings,
    module: nn.Module,
    nodes: int,
    devices: int,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Resolution:
    """Like `resolve`, with the same result on all ranks of ``group``; ``options`` are its other arguments. Collective.

    Raises:
        DocumentError: (or a subclass, on every rank) plan, model, cluster and job do not fit each other, or ranks have
            different ones.
    """

    def identify(resolution: Resolution) -> dict[str, str]:
        return {"plan": resolution.plan.fingerprint, "cluster": resolution.cluster.fingerprint}

    require_equal_structures(module, group)
    return agree(lambda: resolve(settings, module, nodes, devices, **options), identify, group)


def resolve(
    settings: StrategySettings,
    module: nn.Module,
    nodes: int,
    devices: int,
    two_level_collectives: bool = False,
    unshared: str = "",
    also: Container[nn.Parameter] = (),
    proposals: Proposals | None = None,
    cores: int | None = None,
) -> Resolution:
    """Find the plan for a module and compile it, the same on every rank.

    Args:
        module: the module, on its device and in its dtype.
        two_level_collectives: as for `compile_plan`.
        unshared: reason why the ranks cannot share memory; see `memory_fault`.
        also: frozen parameters that the plan also covers, because they train at other times.
        proposals: plans that the search found, if there was one.
        cores: number of cores that all ranks share; see `choose_plan`.

    Raises:
        DocumentError: (or a subclass) plan, model, cluster and job do not fit each other.
    """
    if settings.error is not None:
        raise settings.error
    _check_parameters(module)
    cluster = _cluster(settings, nodes, devices)
    alternatives: Sequence[Alternative] = ()
    if isinstance(settings.plan, SyncPlan):
        check_ranks(settings.plan, settings.source, nodes, devices)
        plan, reason = settings.plan, reason_of_given(settings.source)
        _warn_of_unknown_racks(plan, settings, nodes, devices)
        workload = _by_rows(describe(module, also=also), large_tables(module, also) & _alone(plan))
    else:
        workload = describe_by_rows(module, also)
        if proposals is not None:
            alternatives, plan, reason = proposals.plans, proposals.plans[0].plan, proposals.reason
        else:
            on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
            plan, reason = _make_plan(settings, workload, cluster, on_cpu, unshared, cores)
        check_semantics(plan.semantics, settings.semantics, settings.source)
    schedule = None
    if plan.has_schedule:
        schedule = compile_plan(plan, workload, cluster, settings.source, two_level_collectives)
    return Resolution(workload, cluster, plan, schedule, reason, alternatives)


def _warn_of_unknown_racks(plan: SyncPlan, settings: StrategySettings, nodes: int, devices: int) -> None:
    """Warn of a plan for racks if no cluster tells them: between eight nodes, its steps took four times as long."""
    racks = nodes > 1 and devices == 1 and any(group.topology == "hierarchical" for group in plan.groups)
    if racks and settings.cluster is None:
        rank_zero_warn(
            f"AutoSync: {settings.source}: topology 'hierarchical' sums inside racks first, but no cluster tells which "
            "nodes share a rack, so steps may be slow. Give cluster=FILE, such as the cluster.yaml that "
            "`autosync tune` leaves beside plan.yaml"
        )


def with_connected_interfaces(settings: StrategySettings, group: dist.ProcessGroup | None) -> StrategySettings:
    """The settings, without the network interfaces over which ranks cannot connect; collective.

    They cannot if a rank does not know its address there. With a plan from the user all interfaces stay: if the plan
    needs them, that is an error.
    """
    cluster = settings.cluster
    if cluster is None or settings.plan is not None or cluster.interface_count == 1:
        return settings
    if cluster.world_size != dist.get_world_size(group):
        return settings  # which `resolve` refuses
    count, missing = min(gather_json(connected_interfaces(cluster, dist.get_rank(group)), group))
    if count == cluster.interface_count:
        return settings
    rank_zero_warn(
        f"{missing}: missing, so plans use {counted(count, 'network interface')} of each node, not "
        f"{cluster.interface_count}; give the address, or set {ADDRESSES} on each host"
    )
    return replace(settings, cluster=cluster.with_interfaces(count))


def fall_back(resolution: Resolution, error: OpeningError) -> Resolution:
    """The same with DDP's plan, where ranks cannot open the chosen one.

    Raises:
        OpeningError: ``error``, if there is no such plan to fall back to.
    """
    native = next((each for each in resolution.alternatives if each.native), None)
    if native is None or native is resolution.alternatives[0]:
        raise error
    rest = [each for each in resolution.alternatives[1:] if each is not native]
    waits = " that waits at the end of the backward pass" if native.plan.waits else ""
    name = resolution.alternatives[0].name
    return replace(
        resolution,
        plan=native.plan,
        schedule=compile_plan(native.plan, resolution.workload, resolution.cluster),
        reason=f"fused native all-reduce{waits}, because ranks cannot set up {name}: {error}",
        alternatives=[native, *rest],
    )


def checked_workload(
    settings: StrategySettings, module: nn.Module, nodes: int, devices: int, also: Container[nn.Parameter]
) -> Workload:
    """The workload of a module, after the checks of `resolve`, whose errors this raises too."""
    if settings.error is not None:
        raise settings.error
    _check_parameters(module)
    _cluster(settings, nodes, devices)
    return describe_by_rows(module, also)


def describe_by_rows(module: nn.Module, also: Container[nn.Parameter] = ()) -> Workload:
    """The workload of a module, with large dense embeddings as row-sparse variables."""
    return _by_rows(describe(module, also=also), large_tables(module, also))


def memory_fault(module: nn.Module, nodes: int, devices: int, group: dist.ProcessGroup | None = None) -> str:
    """The reason why ranks cannot keep their gradients in shared memory; empty if they can. Collective."""
    if nodes > 1:
        return f"the ranks are on {nodes} nodes"
    size = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
    return sharing_fault((devices + 1) * size, group)


def _check_parameters(module: nn.Module) -> None:
    """Refuse parameters that no rank can train, before a single rank fails and the others wait."""
    for name, parameter in module.named_parameters():
        if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise PlanError(
                f"model: parameter '{name}' was expanded, so several of its elements share memory; clone() it first"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise PlanError(
                f"model: parameter '{name}' has an optimizer that steps within the backward pass, before gradients or "
                "weights are synchronized; call the optimizer's step() after the pass instead"
            )


def _cluster(settings: StrategySettings, nodes: int, devices: int) -> ClusterSpec:
    if settings.cluster is None:
        return ClusterSpec.uniform(nodes=nodes, devices=devices, name="this job")
    check_size(settings.cluster, nodes, devices)
    return settings.cluster


def check_size(cluster: ClusterSpec, nodes: int, devices: int) -> None:
    """Refuse a cluster of another size than the job.

    Args:
        cluster: the cluster that the user gave.

    Raises:
        ClusterError: it has another number of ranks.
    """
    if cluster.world_size != nodes * devices:
        raise ClusterError(
            f"cluster '{cluster.name}': it has {counted(cluster.world_size, 'rank')}, but the job has "
            f"{_ranks_text(nodes, devices)}; change num_nodes and devices, or the cluster"
        )


def check_ranks(plan: SyncPlan, source: str, nodes: int, devices: int) -> None:
    """Refuse a plan that the user gave for another number of ranks than those of the job.

    Raises:
        PlanError: it is for another number of ranks.
    """
    if plan.world_size != nodes * devices:
        raise PlanError(
            f"{source}: the plan is for {counted(plan.world_size, 'rank')}, but the job has "
            f"{_ranks_text(nodes, devices)}; change num_nodes and devices, or give a plan for "
            f"{counted(nodes * devices, 'rank')}, such as one of 'autosync tune'"
        )


def _ranks_text(nodes: int, devices: int) -> str:
    return f"{nodes * devices} ({counted(nodes, 'node')} x {counted(devices, 'device')})"


def _make_plan(
    settings: StrategySettings,
    workload: Workload,
    cluster: ClusterSpec,
    on_cpu: bool,
    unshared: str,
    cores: int | None,
) -> tuple[SyncPlan, str]:
    if settings.plan is None:
        known = settings.cluster is not None
        return choose_plan(workload, cluster, known, settings.bucket_bytes, on_cpu, unshared, not on_cpu, cores)
    assert isinstance(settings.plan, str)
    sizes: dict[str, Any] = {} if settings.bucket_bytes is None else {"bucket_bytes": settings.bucket_bytes}
    return builders.build(settings.plan, workload, cluster, **sizes), f"by {settings.source}"


def _alone(plan: SyncPlan) -> set[str]:
    """Variables whose message could be row-wise: alone in it, uncompressed, and not cut along another axis."""
    return {
        group.variables[0]
        for group in plan.groups
        if len(group.variables) == 1
        and group.compressor.kind == "none"
        and not (group.partition and group.partition.axis)
    }


def _by_rows(workload: Workload, names: Collection[str]) -> Workload:
    variables = tuple(
        variable.model_copy(update={"kind": "row_sparse"}) if variable.name in names else variable
        for variable in workload.variables
    )
    return workload.model_copy(update={"variables": variables})
