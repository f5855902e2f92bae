"""The costs of all choices for a model on one mesh, as arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy
from numpy.typing import NDArray

from lightning_autosync.hybrid.conversions import HANDED, MADE, TAKEN, States, all_states, home_states
from lightning_autosync.hybrid.cost import (
    BOXING_FORWARD,
    COSTS,
    Costs,
    LayerCosts,
    legal_signatures,
    makes,
    step_seconds,
    takes,
)
from lightning_autosync.hybrid.graph import INPUT, Operator, Weight
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan, Layout, Signature
from lightning_autosync.hybrid.structure import LayoutFlow, Structure

_Item = TypeVar("_Item")
ILLEGAL = 1e6
"""Penalty in seconds of illegal combinations; finite, because the descent subtracts costs and inf - inf is NaN."""


@dataclass
class Tables:
    """Costs of a model's choices on one mesh.

    Choices are numbered: first the signatures of layers, then the layouts of values.

    Attributes:
        signatures: for each choice of a signature, its alternatives.
        layouts: alternatives of every choice of a layout.
        alone: for each choice, its own costs [alternatives, COSTS].
        pairs: for pairs of choices, joint costs [alternatives of the first, of the second, COSTS].
        handed: for each flow whose layout is not a choice, the index of the best layout [alternatives of the source, of
            the target].
    """

    structure: Structure
    costs: LayerCosts
    signatures: tuple[tuple[tuple[Signature, ...], ...], ...]
    layouts: tuple[States, ...]
    alone: list[Costs] = field(default_factory=list)
    pairs: dict[tuple[int, int], Costs] = field(default_factory=dict)
    handed: dict[int, NDArray[numpy.int64]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Number of choices of signatures."""
        return len(self.signatures)

    def total(self, choice: Sequence[int]) -> Costs:
        """[COSTS] total costs with one alternative per choice."""
        total = sum((table[state] for table, state in zip(self.alone, choice, strict=True)), numpy.zeros(COSTS))
        for (one, other), table in self.pairs.items():
            total = total + table[choice[one], choice[other]]
        return total


def tables(structure: Structure, costs: LayerCosts) -> Tables:
    """The costs of all choices."""
    return _Builder(structure, costs).build()


class _Builder:
    def __init__(self, structure: Structure, costs: LayerCosts) -> None:
        self._structure = structure
        self._operators = structure.graph.operators
        self._costs = costs
        self._mesh = costs.pricing.mesh
        dimensions = len(self._mesh)
        self._handed, self._made, self._taken = (all_states(kinds, dimensions) for kinds in (HANDED, MADE, TAKEN))
        signatures = tuple(tuple(self._alternatives(members)) for members in structure.layers)
        self._tables = Tables(structure, costs, signatures, self._handed)
        self._own = self._owners()

    def build(self) -> Tables:
        found = self._tables
        for number, members in enumerate(self._structure.layers):
            found.alone.append(self._layer_alone(number, members))
        for number, members in enumerate(self._structure.values):
            found.alone.append(self._value_alone(number, members))
        for loose in self._structure.graph.loose:
            found.alone[0] += self._costs.loose(loose.weights)
        for number, members in enumerate(self._structure.values):
            self._add_makers(number, members)
        for index, flow in enumerate(self._structure.flows):
            if flow.value is None:
                self._add_lone_flow(index, flow)
            else:
                self._add_shared_flow(flow)
        self._add_ties()
        return found

    def _alternatives(self, members: Sequence[int]) -> list[tuple[Signature, ...]]:
        """The signatures that are legal for all of some operators."""
        unlike = {_sizes(self._operators[member]): self._operators[member] for member in members}
        common = [legal_signatures(operator, self._mesh) for operator in unlike.values()]
        return [signature for signature in common[0] if all(signature in other for other in common[1:])]

    def _owners(self) -> dict[int, list[Weight]]:
        """The weights of each operator; a shared weight belongs to the first one only, so that it counts once."""
        seen: set[str] = set()
        own: dict[int, list[Weight]] = {}
        for index, operator in enumerate(self._operators):
            own[index] = [weight for weight in operator.weights if weight.path not in seen]
            seen.update(weight.path for weight in operator.weights)
        return own

    def _layer_alone(self, number: int, members: Sequence[int]) -> Costs:
        alternatives = self._tables.signatures[number]
        found = numpy.zeros((len(alternatives), COSTS))
        known: dict[object, Costs] = {}
        for member in members:
            operator = self._operators[member]
            own = self._own[member]
            key = (
                operator.kind,
                operator.work,
                operator.output,
                _shapes(operator.weights),
                _shapes(own),
                len(operator.inputs),
            )
            if key not in known:
                known[key] = numpy.array([self._costs.layer(operator, signature, own) for signature in alternatives])
            found += known[key]
            for edge in operator.inputs:
                if edge.source == INPUT:
                    change = self._costs.change(edge.value, (self._home,), self._taken)[0]
                    found[:, BOXING_FORWARD] += change[self._takes(number, operator), BOXING_FORWARD]
        return found

    @property
    def _home(self) -> States:
        return home_states(len(self._mesh))

    def _value_alone(self, number: int, members: Sequence[int]) -> Costs:
        """Costs of bringing the model's input to joins, plus a penalty for layouts that the values cannot have."""
        found = numpy.zeros((len(self._handed), COSTS))
        for member in members:
            for edge in self._operators[member].inputs if self._operators[member].is_join else ():
                if edge.source == INPUT:
                    change = self._costs.change(edge.value, (self._home,), self._handed)[0]
                    found[:, BOXING_FORWARD] += change[:, BOXING_FORWARD]
        found[~self._can_cut(self._structure.units[number]), BOXING_FORWARD] += ILLEGAL
        return found

    def _can_cut(self, units: int) -> NDArray[numpy.bool_]:
        """[layouts] whether features with this many units can be cut in each layout."""
        pieces = numpy.array(
            [
                numpy.prod([size for state, size in zip(states, self._mesh, strict=True) if state == "features"])
                for states in self._handed
            ]
        )
        return units % pieces == 0

    def _makes(self, number: int, operator: Operator) -> list[int]:
        """For each alternative of a layer, the index of its output's states in `MADE`."""
        return [self._made.index(makes(operator, signature)) for signature in self._tables.signatures[number]]

    def _takes(self, number: int, operator: Operator) -> list[int]:
        return [self._taken.index(takes(operator, signature)) for signature in self._tables.signatures[number]]

    def _made_to_handed(self, number: int, makers: Sequence[int]) -> Costs:
        """[alternatives, layouts, COSTS] costs of handing on some operators' results, and of the work after them."""
        found = numpy.zeros((len(self._tables.signatures[number]), len(self._handed), COSTS))
        # Operators with the same output and the same work after it hand on their results at equal costs.
        operators = [self._operators[maker] for maker in makers]
        for operator, count in _alike(operators, lambda operator: (operator.output, operator.after)):
            change = self._costs.change(operator.output, self._made, self._handed)
            after = numpy.array([self._costs.after(operator, states) for states in self._handed])
            found += count * (change[self._makes(number, operator)] + after)
        # Results that are cut by samples must be handed on in that layout.
        illegal = numpy.array(
            [
                [
                    any(one == "batch" and other != "batch" for one, other in zip(made, handed, strict=True))
                    for handed in self._handed
                ]
                for made in self._made
            ]
        )
        found[illegal[self._makes(number, self._operators[makers[0]])], BOXING_FORWARD] += ILLEGAL
        return found

    def _handed_to_taken(self, flow: LayoutFlow) -> Costs:
        """[layouts, alternatives, COSTS] costs of bringing a flow's tensors to the target, each tensor once."""
        if flow.target is None:
            found = numpy.zeros((len(self._handed), 1, COSTS))
            for _, edge in flow.edges:
                found += self._costs.change(edge.value, self._handed, (self._home,))
            return found
        found = numpy.zeros((len(self._handed), len(self._tables.signatures[flow.target]), COSTS))
        tensors = {}
        for taker, edge in flow.edges:
            assert taker is not None
            tensors[edge.source, edge.tensor] = self._operators[taker], edge.value
        for (operator, value), count in _alike(tensors.values(), lambda pair: (pair[0].kind, pair[1])):
            change = self._costs.change(value, self._handed, self._taken)
            found += count * change[:, self._takes(flow.target, operator)]
        found[~self._can_cut(flow.units), :, BOXING_FORWARD] += ILLEGAL
        return found

    def _add_makers(self, number: int, members: Sequence[int]) -> None:
        """Add the joint costs of layers and the choice of their results' layout."""
        makers: dict[int, list[int]] = defaultdict(list)
        for member in members:
            layer = self._structure.layer_of[member]
            if not self._operators[member].is_join and layer is not None:
                makers[layer].append(member)
        for layer, some in makers.items():
            self._add(layer, self._tables.layers + number, self._made_to_handed(layer, some))

    def _add_lone_flow(self, index: int, flow: LayoutFlow) -> None:
        """Add a flow to a single consumer; its best layout is determined here instead of being a choice."""
        assert flow.source is not None
        made, taken = self._made_to_handed(flow.source, flow.makers), self._handed_to_taken(flow)
        seconds = step_seconds(made, overlap=False)[:, :, None] + step_seconds(taken, overlap=False)[None, :, :]
        # `argmin` takes the first of equal costs.
        best = seconds.argmin(axis=1)
        self._tables.handed[index] = best
        sources, targets = numpy.indices(best.shape)
        costs = made[sources, best] + taken[best, targets]
        if flow.target is None:
            self._tables.alone[flow.source] += costs[:, 0]
        else:
            self._add(flow.source, flow.target, costs)

    def _add_shared_flow(self, flow: LayoutFlow) -> None:
        assert flow.value is not None
        value, costs = self._tables.layers + flow.value, self._handed_to_taken(flow)
        if flow.target is None:
            self._tables.alone[value] += costs[:, 0]
        else:
            self._add(value, flow.target, costs)

    def _add(self, one: int, other: int, costs: Costs) -> None:
        if one == other:
            self._tables.alone[one] += numpy.einsum("iic->ic", costs)
            return
        if one > other:
            one, other, costs = other, one, costs.swapaxes(0, 1)
        known = self._tables.pairs.get((one, other))
        self._tables.pairs[one, other] = costs if known is None else known + costs

    def _add_ties(self) -> None:
        """Add penalties for layers that share a weight but cut it, or sum its gradient, in different ways."""
        users: dict[str, list[int]] = defaultdict(list)
        for index, operator in enumerate(self._operators):
            for weight in operator.weights:
                users[weight.path].append(index)
        for path, sharing in users.items():
            for other in sharing[1:]:
                self._add_tie(path, sharing[0], other)

    def _add_tie(self, path: str, one: int, other: int) -> None:
        layers = [self._structure.layer_of[index] for index in (one, other)]
        cuts = []
        for index, layer in zip((one, other), layers, strict=True):
            assert layer is not None
            operator = self._operators[index]
            name = next(weight.name for weight in operator.weights if weight.path == path)
            cuts.append([_held(operator, name, signature) for signature in self._tables.signatures[layer]])
        costs = numpy.zeros((len(cuts[0]), len(cuts[1]), COSTS))
        costs[[[left != right for right in cuts[1]] for left in cuts[0]], BOXING_FORWARD] = ILLEGAL
        one_layer, other_layer = layers
        assert one_layer is not None
        assert other_layer is not None
        self._add(one_layer, other_layer, costs)


def _held(operator: Operator, weight: str, signature: Sequence[Signature]) -> tuple[object, ...]:
    """The storage of a weight along each dimension: the axis that is cut, and whether ranks sum its gradient."""
    return tuple((operator.rules[name].axes.get(weight), name == "dp") for name in signature)


def _sizes(operator: Operator) -> tuple[object, ...]:
    """The properties that determine the legal signatures of an operator."""
    return operator.kind, _shapes(operator.weights), operator.parts, operator.heads


def _shapes(weights: Iterable[Weight]) -> tuple[object, ...]:
    return tuple((weight.name, weight.shape, weight.itemsize, weight.trainable) for weight in weights)


def _alike(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[tuple[_Item, int]]:
    """Items grouped by equal keys: one of each group, and the group's size."""
    groups: dict[Hashable, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [(members[-1], len(members)) for members in groups.values()]


def plan_of(found: Tables, choice: Sequence[int]) -> HybridPlan:
    """The plan with one alternative for each choice."""
    structure, operators = found.structure, found.structure.graph.operators
    outputs = _outputs(found, choice)
    layers: dict[str, LayerPlan] = {}
    for index, operator in enumerate(operators):
        layer = structure.layer_of[index]
        if operator.module is None or layer is None or operator.module in layers:
            continue
        signature = found.signatures[layer][choice[layer]]
        native = tuple(operator.rules[name].output for name in signature)
        output: tuple[Layout, ...] = outputs.get(index, native)
        layers[operator.module] = LayerPlan(
            module=operator.module,
            signature=signature,
            output=None if output == native else output,
            parts=operator.parts if "features" in output else 1,
            batch_axis=operator.output.batch_axis,
        )
    for loose in structure.graph.loose:
        if loose.module not in layers:
            everywhere: tuple[Signature, ...] = tuple("dp" for _ in found.costs.pricing.mesh)
            layers[loose.module] = LayerPlan(module=loose.module, signature=everywhere)
    ranks = found.costs.pricing.ranks
    return HybridPlan(
        workload=structure.graph.fingerprint,
        mesh=found.costs.pricing.mesh,
        ranks=None if ranks == tuple(range(len(ranks))) else ranks,
        layers=tuple(layers.values()),
    )


def _outputs(found: Tables, choice: Sequence[int]) -> dict[int, tuple[Layout, ...]]:
    """The layout in which each operator hands on its result, by index of the operator."""
    structure, outputs = found.structure, {}
    for index, flow in enumerate(structure.flows):
        if flow.value is None and flow.source is not None:
            target = 0 if flow.target is None else choice[flow.target]
            states = found.layouts[found.handed[index][choice[flow.source], target]]
            outputs.update(dict.fromkeys(flow.makers, states))
    for number, members in enumerate(structure.values):
        outputs.update(dict.fromkeys(members, found.layouts[choice[found.layers + number]]))
    return outputs
