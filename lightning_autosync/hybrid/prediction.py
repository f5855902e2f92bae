"""The predicted costs of a plan: seconds of a step, bytes that each rank sends, and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.conversions import COLLECTIVES, Collective, States, home_states, sent, traffic
from lightning_autosync.hybrid.cost import (
    COSTS,
    Costs,
    LayerCosts,
    Settings,
    makes,
    memory_bytes,
    step_seconds,
    summed,
    takes,
)
from lightning_autosync.hybrid.execution.functions.operands import unify
from lightning_autosync.hybrid.execution.layouts import Layout as Placement
from lightning_autosync.hybrid.graph import INPUT, Edge, Graph, Operator, Value
from lightning_autosync.hybrid.mesh import Links
from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates

Pass = Literal["forward", "backward", "gradients"]


@dataclass(frozen=True)
class Sent:
    """Bytes that each rank sends in a step, in one phase, along some dimensions, by one kind of collective.

    Attributes:
        phase: ``forward`` and ``backward`` for changes of layout, ``gradients`` for the sums over replicas.
        dimensions: dimensions of the mesh along which the groups lie.
        collective: kind of the collective.
        bytes: bytes of payload.
    """

    phase: Pass
    dimensions: tuple[int, ...]
    collective: Collective
    bytes: float


@dataclass(frozen=True)
class HybridPrediction:
    """The predicted costs of a plan.

    Attributes:
        costs: [COSTS] see `lightning_autosync.hybrid.cost`.
        sent: bytes by phase, dimensions and collective, without zeros.
        settings: settings of the prediction.
    """

    costs: Costs
    sent: tuple[Sent, ...]
    settings: Settings

    @property
    def step_seconds(self) -> float:
        return float(step_seconds(self.costs, self.settings.overlap))

    @property
    def memory(self) -> float:
        """Bytes on one rank."""
        return float(memory_bytes(self.costs))

    @property
    def bytes(self) -> float:
        """Bytes that each rank sends in a step."""
        return sum(part.bytes for part in self.sent)


def predict(
    plan: HybridPlan,
    graph: Graph,
    cluster: ClusterSpec | Links,
    rates: HybridRates | None = None,
    settings: Settings | None = None,
) -> HybridPrediction:
    """Predict the costs of a plan on a cluster.

    Args:
        plan: a plan for the model of ``graph``.
        graph: graph of the model.
        cluster: a cluster with known rates, or its links.
        rates: rates of the hosts and the backend; None takes the defaults.
        settings: settings of the step; None takes the defaults.

    Raises:
        PlanError: the plan is for another model or number of ranks, or an operator has no layer.
        ClusterError: the rates of the links are unknown.
    """
    links = cluster if isinstance(cluster, Links) else Links(cluster)
    if plan.world_size != links.cluster.world_size:
        raise PlanError(
            f"plan: mesh: {plan.world_size} ranks, cluster '{links.cluster.name}' has {links.cluster.world_size}"
        )
    if plan.workload not in (None, graph.fingerprint):
        raise PlanError(
            f"plan: workload: it was made for another model ({plan.workload}; this one is {graph.fingerprint})"
        )
    ranks = tuple(int(rank) for rank in plan.rank_array.ravel())
    settings = settings or Settings()
    costs = LayerCosts(Pricing(plan.mesh, ranks, links, rates or HybridRates()), settings)
    return _Predictor(plan, graph, costs).run()


class _Predictor:
    def __init__(self, plan: HybridPlan, graph: Graph, costs: LayerCosts) -> None:
        self._plan, self._graph, self._costs = plan, graph, costs
        self._home = home_states(len(plan.mesh))
        self._total = numpy.zeros(COSTS)
        self._sent: dict[tuple[Pass, tuple[int, ...], Collective], float] = defaultdict(float)
        self._taken: set[tuple[int, str, States]] = set()
        self._handed: list[States] = []

    def run(self) -> HybridPrediction:
        seen: set[str] = set()
        for operator in self._graph.operators:
            if operator.meets:
                self._handed.append(self._meet(operator))
                continue
            if operator.module is None:
                self._take(operator, self._home)
                self._handed.append(self._home)
                continue
            layer = self._plan.layer(operator.module)
            if layer is None:
                raise PlanError(f"plan: layers: '{operator.module}' has parameters and no layer")
            own = [weight for weight in operator.weights if weight.path not in seen]
            seen.update(weight.path for weight in own)
            self._total += self._costs.layer(operator, layer.signature, own)
            for dimensions, size in summed(operator, own, layer.signature, self._plan.mesh).items():
                self._sum(dimensions, size)
            self._take(operator, takes(operator, layer.signature))
            made, handed = makes(operator, layer.signature), handed_on(operator, layer)
            self._change(operator.output, made, handed)
            self._total += self._costs.after(operator, handed)
            self._handed.append(handed)
        for loose in self._graph.loose:
            self._total += self._costs.loose(loose.weights)
            trained = sum(weight.bytes for weight in loose.weights if weight.trainable)
            self._sum(tuple(range(len(self._plan.mesh))), trained)
        for index in self._graph.outputs:
            self._change(self._graph.operators[index].output, self._handed[index], self._home)
        sent = tuple(Sent(*key, size) for key, size in self._sent.items() if size)
        return HybridPrediction(self._total, sent, self._costs.settings)

    def _meet(self, operator: Operator) -> States:
        """Add the changes at a meeting, where results in different layouts are brought into one, as in execution."""
        sources = [edge for edge in operator.inputs if edge.source != INPUT]
        states = unify([Placement(self._handed[edge.source]) for edge in sources])
        for edge in operator.inputs:
            self._bring(edge, states)
        return states

    def _take(self, operator: Operator, states: States) -> None:
        for edge in operator.inputs:
            self._bring(edge, states)

    def _bring(self, edge: Edge, states: States) -> None:
        """Add the change of a tensor to other states; it happens once for all operators that need it."""
        key = edge.source, edge.tensor, states
        if key in self._taken:
            return
        self._taken.add(key)
        if edge.source == INPUT:
            self._change(replace(edge.value, differentiable=False), self._home, states)
        else:
            self._change(edge.value, self._handed[edge.source], states)

    def _change(self, value: Value, source: States, goal: States) -> None:
        if source == goal:
            return
        self._total += self._costs.change(value, (source,), (goal,))[0, 0]
        sends = traffic(self._plan.mesh, (source,), (goal,), value.batch_axis is not None)
        self._log("forward", sends.forward[0, 0] * value.bytes)
        if value.differentiable:
            self._log("backward", sends.backward[0, 0] * value.bytes)

    def _log(self, phase: Pass, sends: Costs) -> None:
        for dimension, row in enumerate(sends):
            for collective, size in zip(COLLECTIVES, row, strict=True):
                self._sent[phase, (dimension,), collective] += float(size)

    def _sum(self, dimensions: tuple[int, ...], size: float) -> None:
        ranks = int(numpy.prod([self._plan.mesh[dimension] for dimension in dimensions]))
        if ranks > 1:
            self._sent["gradients", dimensions, "all_reduce"] += size * sent("sum", ranks)


def handed_on(operator: Operator, layer: LayerPlan) -> States:
    """The states in which a layer hands on its output."""
    asked: Sequence[str | None] = layer.output or (None,) * len(layer.signature)
    rules = [operator.rules[name] for name in layer.signature]
    states = (
        "batch" if rule.result == "batch" else want or rule.output for rule, want in zip(rules, asked, strict=True)
    )
    return tuple(states)  # type: ignore[arg-type]
