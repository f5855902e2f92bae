"""Traces the tensors of a model: its exported graph, with all operations of an operator merged into one node."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_autosync.hybrid.axes import Axes, after, is_known, shape_of
from lightning_autosync.hybrid.graph import INPUT, Edge, Value
from lightning_autosync.hybrid.recording import operator_paths, training
from lightning_autosync.hybrid.signatures import feature_axis


@dataclass
class TraceNode:
    """A call of an operator or, without a path, a join of several results or an operation on whole values.

    Attributes:
        path: path of the module; None for other nodes.
        name: the path; for other nodes the path of the surrounding module and a number.
        inputs: its inputs, each tensor once.
        output: its output.
        parts: number of results that follow each other along its features.
        is_home: whether it is an operation that needs whole values of each rank's own samples.
    """

    path: str | None
    name: str
    inputs: list[Edge] = field(default_factory=list)
    output: Value | None = None
    axes: Axes = field(default_factory=Axes)
    parts: int = 1
    is_home: bool = False


@dataclass
class Trace:
    """A traced model.

    Attributes:
        nodes: the nodes, in the order of the forward pass.
        outputs: indices of the nodes that make the model's output.
        loose: for each parameter that is used between operators, by its path, the index of the node in whose output's
            layout it is used.
    """

    nodes: list[TraceNode]
    outputs: tuple[int, ...]
    loose: Mapping[str, int]


@dataclass(frozen=True)
class _Flow:
    """The origin of a tensor.

    Attributes:
        origin: index of a node, `INPUT`, or None for a tensor that does not depend on the model's input.
        parameter: path of the parameter that the tensor is; None for other tensors.
    """

    origin: int | None
    axes: Axes
    shape: tuple[int, ...]
    parameter: str | None = None


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Trace a model.

    Raises:
        Exception: any error that ``torch.export`` raises for a model that it cannot follow.
    """
    with training(module), warnings.catch_warnings():
        # Recurrent layers store parameters in a list when they are set, which export reports; it restores the old ones.
        warnings.filterwarnings("ignore", message=".*were assigned during export")
        exported = torch.export.export(module, args, dict(kwargs), strict=False)
    return _Tracer(module, exported).run()


class _Tracer:
    def __init__(self, module: nn.Module, exported: torch.export.ExportedProgram) -> None:
        self._module = module
        self._nodes: list[TraceNode] = []
        self._flows: dict[fx.Node, _Flow] = {}
        self._calls: dict[str, int] = {}
        self._within: dict[fx.Node, int] = {}
        self._places: Counter[str] = Counter()
        self._loose: dict[str, int] = {}
        self._graph = exported.graph
        self._parameters = exported.graph_signature.inputs_to_parameters
        self._batch: int | None = None
        self._inputs = set(exported.graph_signature.user_inputs)
        paths: dict[nn.Module, str] = {}
        for path, part in operator_paths(module).items():
            paths.setdefault(part, path)
        self._paths = paths

    def run(self) -> Trace:
        outputs: list[int] = []
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._flows[node] = self._placeholder(node)
            elif node.op == "call_function":
                self._flows[node] = self._called(node)
            elif node.op == "output":
                found = [self._flows[argument].origin for argument in node.all_input_nodes]
                outputs = [origin for origin in dict.fromkeys(found) if origin is not None and origin != INPUT]
        return Trace(self._nodes, tuple(outputs), self._loose)

    def _placeholder(self, node: fx.Node) -> _Flow:
        shape = shape_of(node.meta.get("val"))
        if node.name in self._inputs:
            self._batch = self._batch or next(iter(shape), None)
            return _Flow(INPUT, Axes(batch=0 if shape else None), shape)
        return _Flow(None, Axes(), shape, self._parameters.get(node.name))

    def _called(self, node: fx.Node) -> _Flow:
        call = self._operator_call(node)
        if call is not None:
            return self._inside(node, *call)
        flows = [self._flows[argument] for argument in node.all_input_nodes]
        shape = shape_of(node.meta.get("val"))
        moving = [flow for flow in flows if flow.origin is not None]
        if not moving:
            return _Flow(None, Axes(), shape)
        for argument in node.all_input_nodes:
            self._use(argument)
        if getattr(node.target, "__name__", "") == "getitem":
            return _Flow(flows[0].origin, flows[0].axes, shape)
        if not is_known(node) and (found := self._at_home(node, moving, shape)) is not None:
            return found
        axes = after(node, [(flow.axes, flow.shape) for flow in flows], shape)
        origin = self._origin(node, moving, axes, shape)
        for flow in flows:
            if flow.parameter is not None and origin != INPUT:
                self._loose.setdefault(flow.parameter, origin)
        return _Flow(origin, axes, shape)

    def _at_home(self, node: fx.Node, moving: Sequence[_Flow], shape: tuple[int, ...]) -> _Flow | None:
        """A new node for an operation on whole values of each rank's own samples; None if its inputs are already."""
        edges = []
        for argument in node.all_input_nodes:
            flow = self._flows[argument]
            if flow.origin is not None and flow.origin != INPUT and not self._nodes[flow.origin].is_home:
                edges.append(Edge(flow.origin, _value(argument, flow), 1, argument.name))
        if not edges or not _tensors(node):
            return None
        batch = moving[0].axes.batch
        axes = Axes(batch if batch is not None and batch < len(shape) else None, mixed=True)
        self._nodes.append(
            TraceNode(None, self._place(node), edges, _value(node, _Flow(None, axes, shape)), axes, is_home=True)
        )
        return _Flow(len(self._nodes) - 1, axes, shape)

    def _place(self, node: fx.Node) -> str:
        place = _innermost(node)
        self._places[place] += 1
        return f"{place}#{self._places[place]}"

    def _origin(self, node: fx.Node, moving: Sequence[_Flow], axes: Axes, shape: tuple[int, ...]) -> int:
        """The node from which a result comes; a new node if results of several nodes meet."""
        # A part of the model's input that is smaller than the result, such as a mask, fits any layout of the others.
        origins = {flow.origin for flow in moving if flow.origin != INPUT or math.prod(flow.shape) >= math.prod(shape)}
        origins = origins or {INPUT}
        if len(origins) == 1:
            return next(origin for origin in origins if origin is not None)
        edges: dict[int, Edge] = {}
        for argument in node.all_input_nodes:
            flow = self._flows[argument]
            if flow.origin is not None and flow.origin in origins:
                units = axes.units if axes.features is not None else 1
                edges[flow.origin] = Edge(flow.origin, _value(argument, flow), units, argument.name)
        for flow in moving:
            self._note_parts(flow)
        self._nodes.append(
            TraceNode(None, self._place(node), list(edges.values()), _value(node, _Flow(None, axes, shape)), axes)
        )
        return len(self._nodes) - 1

    def _operator_call(self, node: fx.Node) -> tuple[str, str] | None:
        """The path of the operator to which a node belongs, and a key of this call; None if it belongs to none."""
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            part = _submodule(self._module, path)
            if part in self._paths:
                return self._paths[part], f"{key} {path}"
        return None

    def _inside(self, node: fx.Node, path: str, call: str) -> _Flow:
        """Add an operation of an operator; the output of its last operation is taken as the operator's output."""
        if call not in self._calls:
            self._calls[call] = len(self._nodes)
            self._nodes.append(TraceNode(path, path))
        index = self._calls[call]
        operator, module = self._nodes[index], self._module.get_submodule(path)
        for argument in node.all_input_nodes:
            flow = self._flows[argument]
            if flow.origin == index:
                continue
            if flow.origin is None:
                self._take_constant(operator, module, argument)
                continue
            self._use(argument)
            self._note_parts(flow)
            place = feature_axis(module) % max(len(flow.shape), 1)
            units = flow.axes.units if flow.axes.features == place else 1
            edge = Edge(flow.origin, _value(argument, flow), units, argument.name)
            if edge not in operator.inputs:
                operator.inputs.append(edge)
        shape = shape_of(node.meta.get("val"))
        batch = operator.inputs[0].value.batch_axis if operator.inputs else None
        if batch is None and shape and shape[0] == self._batch:
            batch = 0  # made from a constant with one row per sample
        axes = Axes()
        if shape and (batch is None or batch < len(shape)):
            place = feature_axis(module) % len(shape)
            axes = Axes(batch, place if place != batch else None, shape[place])
        flow = _Flow(index, axes, shape)
        operator.output, operator.axes = _value(node, flow), axes
        self._within[node] = index
        return flow

    def _take_constant(self, operator: TraceNode, module: nn.Module, argument: fx.Node) -> None:
        """Treat constant indices of an embedding as if they were part of the model's input."""
        shape = self._flows[argument].shape
        if not isinstance(module, nn.Embedding) or self._flows[argument].parameter is not None:
            return
        axes = Axes(batch=0 if shape and shape[0] == self._batch else None)
        value = _value(argument, _Flow(INPUT, axes, shape))
        operator.inputs.append(Edge(INPUT, value, 1, argument.name))

    def _use(self, argument: fx.Node) -> None:
        """If the result of an operator's operation is used outside of the operator, it is the operator's output."""
        if argument in self._within:
            operator, flow = self._nodes[self._within[argument]], self._flows[argument]
            operator.output, operator.axes = _value(argument, flow), flow.axes

    def _note_parts(self, flow: _Flow) -> None:
        if flow.origin is not None and flow.origin != INPUT and flow.axes.parts > 1:
            self._nodes[flow.origin].parts = flow.axes.parts


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path.split("@")[0])
    except AttributeError:
        return None


def _innermost(node: fx.Node) -> str:
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return paths[-1] if paths else ""


def _tensors(node: fx.Node) -> list[Tensor]:
    """The tensors that a node returns."""
    value: Any = node.meta.get("val")
    return [part for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, Tensor)]


def _value(node: fx.Node, flow: _Flow) -> Value:
    tensor = _tensors(node)[0]
    return Value(flow.shape, tensor.element_size(), flow.axes.batch, tensor.is_floating_point())
