"""Checks that a plan fits a model and a job."""

from __future__ import annotations

from torch import nn

from lightning_autosync.documents import counted, digest
from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan
from lightning_autosync.hybrid.signatures import kind_of, refusal, rules_of
from lightning_autosync.workload import variable_names


def fingerprint(module: nn.Module) -> str:
    """Digest of the names and shapes of all parameters, including frozen ones, to which a plan is bound."""
    named = variable_names(module, also=set(module.parameters()))
    return digest([[name, list(parameter.shape)] for name, parameter in named])


def check_plan(plan: HybridPlan, module: nn.Module, world_size: int, source: str = "plan") -> None:
    """Check that a plan fits a model and a job.

    Args:
        module: the model to split; it may be on the meta device.
        world_size: number of ranks of the job.
        source: name of the plan in errors.

    Raises:
        PlanError: the plan was made for another model or number of ranks, a layer cannot be split as planned, or
            parameters belong to no layer; the message names the field.
    """
    if plan.world_size != world_size:
        mesh = " x ".join(map(str, plan.mesh))
        raise PlanError(f"{source}: mesh: {mesh} is {plan.world_size} ranks, but the job has {world_size}")
    if plan.workload is not None and plan.workload != (found := fingerprint(module)):
        raise PlanError(
            f"{source}: workload: it was made for another model ({plan.workload}; this {type(module).__name__} is "
            f"{found}, by the names and shapes of its parameters)"
        )
    modules = dict(module.named_modules())
    for index, layer in enumerate(plan.layers):
        where = f"{source}: layers[{index}]"
        if layer.module not in modules:
            raise PlanError(f"{where}.module: the model has no module '{layer.module}'")
        _check_layer(plan, layer, modules[layer.module], where)
    _check_parameters(plan, modules, source)


def _check_layer(plan: HybridPlan, layer: LayerPlan, module: nn.Module, where: str) -> None:
    if why := refusal(module, layer.signature, plan.mesh, layer.parts):
        raise PlanError(f"{where} ('{layer.module}'): signature: {why}")


def _check_parameters(plan: HybridPlan, modules: dict[str, nn.Module], source: str) -> None:
    """Check that each parameter belongs to a layer, and that layers that share a parameter cut it alike."""
    inside = tuple(f"{path}." for layer in plan.layers if kind_of(modules[path := layer.module]) == "attention")
    cuts: dict[nn.Parameter, tuple[str, list[int | None]]] = {}
    homeless: dict[nn.Parameter, str] = {}
    for path, part in modules.items():
        if path.startswith(inside):
            continue
        layer, rules = plan.layer(path), rules_of(part)
        for name, parameter in part.named_parameters(recurse=False):
            if layer is None:
                homeless[parameter] = f"{path}.{name}" if path else name
                continue
            cut = [rules[signature].axes.get(name) for signature in layer.signature]
            other, known = cuts.setdefault(parameter, (path, cut))
            if known != cut:
                raise PlanError(
                    f"{source}: layers: '{path}' and '{other}' share the parameter {name}, but cut it along different "
                    f"axes: {_shown(cut)} and {_shown(known)}; allowed: the same axes"
                )
    # A tied parameter may also be found in a module without a layer; one layer that has it is enough.
    lost = [path for parameter, path in homeless.items() if parameter not in cuts]
    if lost:
        more = counted(len(lost) - 1, "other parameter")
        told = f"the parameter '{lost[0]}' belongs" if len(lost) == 1 else f"'{lost[0]}' and {more} belong"
        raise PlanError(f"{source}: layers: {told} to no layer")


def _shown(cut: list[int | None]) -> str:
    return "/".join("-" if axis is None else str(axis) for axis in cut)
