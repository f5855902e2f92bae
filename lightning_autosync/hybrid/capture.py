"""Captures the graph of an unmodified module."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_autosync.errors import WorkloadError
from lightning_autosync.hybrid.axes import Axes
from lightning_autosync.hybrid.graph import Edge, Graph, Loose, Operator, Value, Weight, Work
from lightning_autosync.hybrid.recording import Call, operator_paths, record
from lightning_autosync.hybrid.signatures import HOME, class_of, feature_axis, kind_of, rules_of
from lightning_autosync.hybrid.tracing import Trace, TraceNode, trace
from lightning_autosync.hybrid.validation import fingerprint
from lightning_autosync.workload.description import title


def capture(module: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """The operators of a module and the tensors between them; nothing is computed.

    The graph is that of ``torch.export``. If the model cannot be exported, each operator is assumed to feed the next
    one that is called, and a note says so.

    Args:
        module: the unmodified module; it may be on the meta device.
        args, kwargs: arguments of its ``forward`` on one rank. Only shapes and dtypes of tensors matter; samples are
            along the first axis.

    Raises:
        WorkloadError: the forward pass needs values of tensors, gets no tensor, or calls no operator with parameters.
    """
    if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves((args, kwargs))):
        raise WorkloadError(f"{title(module)}: its forward pass gets no tensor with an axis of samples")
    calls, _ = record(module, args, kwargs)
    if len(calls) < 2:
        raise WorkloadError(
            f"{title(module)}: its forward pass calls no module with parameters, so nothing can be split"
        )
    traced, notes = _traced(module, args, kwargs, calls)
    paths = {parameter: path for path, parameter in module.named_parameters()}
    outside = _held_outside(module)
    return Graph(
        fingerprint(module),
        tuple(_operators(module, traced.nodes, calls, paths, outside)),
        traced.outputs,
        tuple(_loose(module, traced.loose)),
        (*notes, *_notes(module)),
    )


def _traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], calls: Sequence[Call]
) -> tuple[Trace, list[str]]:
    """The traced model and notes; edges are guessed from the order of calls if the model cannot be exported."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    values = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, (args, dict(kwargs)))
    try:
        found = trace(module, *values)
    except Exception as error:  # export raises errors of all kinds for models that it cannot follow
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return _chain(module, calls), [
            (
                "the model cannot be exported, so layers are assumed to form a chain in the order of their calls: "
                f"{reason}"
            )
        ]
    if sorted(node.path for node in found.nodes if node.path is not None) != sorted(call.path for call in calls[1:]):
        return _chain(module, calls), [
            "the exported model has other layers, so layers are assumed to form a chain in the order of their calls"
        ]
    return found, []


def _chain(module: nn.Module, calls: Sequence[Call]) -> Trace:
    nodes: list[TraceNode] = []
    for index, call in enumerate(calls[1:]):
        given = call.inputs[0] if call.inputs else None
        place = feature_axis(module.get_submodule(call.path))
        node = TraceNode(call.path, call.path)
        if given is not None:
            value = Value(tuple(given.shape), given.element_size(), 0, given.is_floating_point())
            width = given.shape[place] if given.dim() > 1 and given.is_floating_point() else 1
            units = math.gcd(width, nodes[-1].axes.units if nodes else 1)
            node.inputs.append(Edge(index - 1, value, units, str(index)))
        made = call.output
        if made is None:
            raise WorkloadError(f"{title(module)}: '{call.path}' returns no tensor")
        node.output = Value(tuple(made.shape), made.element_size(), 0, made.is_floating_point())
        node.axes = Axes(0, place % made.dim(), made.shape[place])
        nodes.append(node)
    return Trace(nodes, (len(nodes) - 1,), {})


def _operators(
    module: nn.Module,
    nodes: Sequence[TraceNode],
    calls: Sequence[Call],
    paths: Mapping[nn.Parameter, str],
    outside: Set[nn.Parameter],
) -> list[Operator]:
    waiting: dict[str, list[Call]] = defaultdict(list)
    for call in calls[1:]:
        waiting[call.path].append(call)
    operators = []
    for node in nodes:
        if node.output is None:
            raise WorkloadError(f"{title(module)}: '{node.name}' makes no tensor")
        units = node.axes.units if node.axes.features is not None else 1
        if node.path is None:
            rules = HOME if node.is_home else {}
            operators.append(Operator(node.name, None, None, rules, tuple(node.inputs), node.output, units))
            continue
        part, call = module.get_submodule(node.path), waiting[node.path].pop(0)
        weights = tuple(
            _weight(name, parameter, paths, parameter in outside) for name, parameter in part.named_parameters()
        )
        inputs = tuple(node.inputs)
        operators.append(
            Operator(
                *(node.path, node.path, kind_of(part), rules_of(part), inputs, node.output, units, node.parts, weights),
                *(getattr(part, "num_heads", 1), call.work, call.after + (calls[0].after if not operators else Work())),
            )
        )
    return operators


def _weight(name: str, parameter: nn.Parameter, paths: Mapping[nn.Parameter, str], outside: bool) -> Weight:
    shape = tuple(parameter.shape)
    return Weight(name, paths[parameter], shape, parameter.element_size(), parameter.requires_grad, outside)


def _held_outside(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of modules that are neither operators nor inside of one."""
    operators = {part for operator in operator_paths(module).values() for part in operator.modules()}
    rest = (part for part in module.modules() if part not in operators)
    return {parameter for part in rest for parameter in part.parameters(recurse=False)}


def _loose(module: nn.Module, used: Mapping[str, int]) -> list[Loose]:
    found: dict[tuple[str, int], list[Weight]] = defaultdict(list)
    for path, operator in used.items():
        owner, _, name = path.rpartition(".")
        parameter = module.get_parameter(path)
        found[owner, operator].append(_weight(name, parameter, {parameter: path}, outside=True))
    return [Loose(owner, tuple(weights), operator) for (owner, operator), weights in found.items()]


def _notes(module: nn.Module) -> list[str]:
    """Notes on modules that cannot be split, one per class."""
    unknown: dict[str, list[str]] = defaultdict(list)
    for path, part in operator_paths(module).items():
        if kind_of(part) == "unknown":
            unknown[class_of(part)].append(path)
    return [
        (
            f"{name} cannot be split by this release, only data parallelism is possible "
            f"({', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''})"
        )
        for name, paths in unknown.items()
    ]
