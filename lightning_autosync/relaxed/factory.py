"""Makes the synchronizer for a plan's consistency."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import Group, SyncPlan
from lightning_autosync.plan.compiler import check_variables
from lightning_autosync.plan.servers import server_layout
from lightning_autosync.relaxed.averaging_worker import PartialReduce
from lightning_autosync.relaxed.base import Synchronizer
from lightning_autosync.relaxed.model_state import ModelTensors, UntrainedTensors
from lightning_autosync.relaxed.periodic import Periodic
from lightning_autosync.relaxed.server import ParameterServer
from lightning_autosync.relaxed.transport.heartbeat import STALL
from lightning_autosync.relaxed.transport.mesh import Mesh
from lightning_autosync.workload import Workload, shortened_rows, variable_names

_OF_GRADIENTS = ("architecture", "topology", "partition", "placement", "compressor", "local_aggregation")
"""Settings of a group that apply to the exchange of gradients, and are therefore not allowed for averages of models."""


def open_synchronizer(
    plan: SyncPlan,
    workload: Workload,
    module: nn.Module,
    mesh: Mesh,
    *,
    optimizer: Optimizer | None = None,
    cluster: ClusterSpec | None = None,
    timeout: float = 1800.0,
    stall: float = STALL,
    source: str = "plan",
) -> Synchronizer:
    """The synchronizer of this worker, not started, for a relaxed plan or a synchronous plan with parameter servers.

    Args:
        plan: a plan without a schedule.
        workload: the variables of ``module``.
        module: the model, on its device and in its dtype; changed in place.
        mesh: connects the plan's ranks, followed by its server-only ranks; owned by the caller.
        optimizer: the optimizer of the parameters; needed with servers, which apply its update rule.
        cluster: the nodes; needed if the workers of a node push one sum (``local_aggregation``).
        timeout: seconds to wait for other workers or for servers.
        stall: seconds without progress after which the average of a group fails.
        source: name of the plan in errors.

    Raises:
        PlanError: plan, model, mesh and optimizer do not fit each other.
    """
    if plan.has_schedule:
        raise PlanError("plan: consistency.mode 'synchronous' without `served` has a schedule; use Engine for it")
    if mesh.size != plan.world_size + plan.servers:
        raise PlanError(
            f"plan: {plan.world_size} ranks and {plan.servers} server-only ranks do not match a mesh of {mesh.size} "
            "ranks"
        )
    check_variables(plan, workload, source)
    consistency = plan.consistency
    if consistency.mode in ("partial_reduce", "periodic"):
        if plan.servers:
            raise PlanError(f"{source}: servers: mode '{consistency.mode}' uses no servers; remove this field")
        _check_groups(plan, source)
        kind = PartialReduce if consistency.mode == "partial_reduce" else Periodic
        return kind(mesh, ModelTensors.of(module), consistency, timeout=timeout, stall=stall)
    if optimizer is None:
        raise PlanError(f"optimizer: missing; mode '{consistency.mode}' needs it, because servers make its updates")
    _check_parameters(module)
    return ParameterServer(
        mesh,
        variable_names(module),
        server_layout(plan, workload, source),
        optimizer,
        consistency,
        buffers=UntrainedTensors(module),
        nodes=None if cluster is None else [cluster.ranks_of(node) for node in range(len(cluster.nodes))],
        timeout=timeout,
    )


def _check_groups(plan: SyncPlan, source: str) -> None:
    """Raise ``PlanError`` if a plan that averages models has settings for gradients."""
    for index, group in enumerate(plan.groups):
        for name in _OF_GRADIENTS:
            if getattr(group, name) != Group.model_fields[name].default:
                raise PlanError(
                    f"{source}: groups[{index}] '{group.name}': {name}: mode '{plan.consistency.mode}' averages "
                    "models, so this setting has no effect; remove it"
                )


def _check_parameters(module: nn.Module) -> None:
    """Raise ``PlanError`` if servers cannot keep the parameters of a module."""
    shortened = shortened_rows(module)
    for name, parameter in variable_names(module):
        if parameter in shortened:
            raise PlanError(
                f"model: '{name}' is an embedding with max_norm: each forward pass rescales the rows that it reads, "
                "but servers keep the parameters, and do not learn of that; allowed: plans of mode 'partial_reduce' or "
                "'periodic', and synchronous plans without `served`"
            )
        if parameter.is_complex():
            raise PlanError(
                f"model: parameter '{name}' is complex, but servers keep real parameters only; allowed: plans of mode "
                "'partial_reduce' or 'periodic', and synchronous plans without `served`"
            )
