"""The predicted costs of a plan: seconds of a step, bytes that each rank sends, and memory in the course of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal

import numpy
from pydantic import Field

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.conversions import (
    COLLECTIVES,
    Collective,
    States,
    home_states,
    local_size,
    sent,
    traffic,
)
from lightning_autosync.hybrid.cost import (
    COSTS,
    GRADIENTS,
    KEPT,
    STATE,
    Costs,
    LayerCosts,
    StepSettings,
    makes,
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
class SentBytes:
    """Bytes that each rank sends in a step, in one phase, along some dimensions, by one kind of collective.

    Attributes:
        phase: ``forward`` and ``backward`` for changes of layout, ``gradients`` for the sums over replicas.
        dimensions: dimensions of the mesh along which the groups lie.
        collective: kind of the collective.
        bytes: bytes of payload.
    """

    phase: Annotated[Pass, Field(alias="pass")]
    dimensions: tuple[int, ...]
    collective: Collective
    bytes: float


@dataclass(frozen=True)
class HybridPrediction:
    """The predicted costs of a plan.

    Attributes:
        costs: [COSTS] see `lightning_autosync.hybrid.cost`.
        sent: bytes by phase, dimensions and collective, without zeros.
        stages: what a rank holds in the course of a step.
    """

    costs: Costs
    sent: tuple[SentBytes, ...]
    settings: StepSettings
    stages: tuple[MemoryStage, ...]

    @property
    def step_seconds(self) -> float:
        return float(step_seconds(self.costs, self.settings.overlap))

    @property
    def memory(self) -> float:
        """The most bytes of tensors on one rank: parameters, optimizer state, buffers of messages, and what it holds in
        the course of a step."""
        return float(self.costs[STATE]) + peak_bytes(self.stages)

    @property
    def bytes(self) -> float:
        """Bytes that each rank sends in a step."""
        return sum(part.bytes for part in self.sent)


def predict(
    plan: HybridPlan,
    graph: Graph,
    cluster: ClusterSpec | Links,
    rates: HybridRates | None = None,
    settings: StepSettings | None = None,
) -> HybridPrediction:
    """Predict the costs of a plan on a cluster.

    Args:
        plan: a plan for the model of ``graph``.
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
            f"plan: mesh: it has {plan.world_size} ranks, but cluster '{links.cluster.name}' has "
            f"{links.cluster.world_size}"
        )
    if plan.workload not in (None, graph.fingerprint):
        raise PlanError(
            f"plan: workload: it was made for another model ({plan.workload}; this one is {graph.fingerprint})"
        )
    ranks = tuple(int(rank) for rank in plan.rank_array.ravel())
    settings = settings or StepSettings()
    costs = LayerCosts(Pricing(plan.mesh, ranks, links, rates or HybridRates()), settings)
    return predict_with(costs, plan, graph)


def predict_with(costs: LayerCosts, plan: HybridPlan, graph: Graph) -> HybridPrediction:
    """What a plan costs on the mesh of ``costs``, which is its own.

    Raises:
        PlanError: an operator has no layer.
    """
    return _Predictor(plan, graph, costs).run()


class _Predictor:
    def __init__(self, plan: HybridPlan, graph: Graph, costs: LayerCosts) -> None:
        self._plan, self._graph, self._costs = plan, graph, costs
        self._home = home_states(len(plan.mesh))
        self._total = numpy.zeros(COSTS)
        self._sent: dict[tuple[Pass, tuple[int, ...], Collective], float] = defaultdict(float)
        self._taken: set[tuple[int, str, States]] = set()
        self._handed: list[States] = []
        self._stages: list[MemoryStage] = []

    def run(self) -> HybridPrediction:
        seen: set[str] = set()
        for operator in self._graph.operators:
            if operator.is_join:
                self._handed.append(self._join(operator))
                continue
            if operator.module is None:
                self._take(operator, self._home)
                self._handed.append(self._home)
                continue
            layer = self._plan.layer(operator.module)
            if layer is None:
                raise PlanError(f"plan: layers: module '{operator.module}' has parameters, but no layer in the plan")
            own = [weight for weight in operator.weights if weight.path not in seen]
            seen.update(weight.path for weight in own)
            costs = self._costs.layer(operator, layer.signature, own)
            for dimensions, size in summed(operator, own, layer.signature, self._plan.mesh).items():
                self._sum(dimensions, size)
            brought = self._take(operator, takes(operator, layer.signature))
            made, handed = makes(operator, layer.signature), handed_on(operator, layer)
            self._hold(operator, layer, costs, brought)
            self._change(operator.output, made, handed)
            following = self._costs.after(operator, handed)
            self._stages.append(MemoryStage(kept=float(following[KEPT])))
            self._total += costs + following
            self._handed.append(handed)
        for loose in self._graph.loose:
            costs = self._costs.loose(loose.weights)
            self._total += costs
            self._stages.append(MemoryStage(gradients=float(costs[GRADIENTS])))
            trained = sum(weight.bytes for weight in loose.weights if weight.trainable)
            self._sum(tuple(range(len(self._plan.mesh))), trained)
        for index in self._graph.outputs:
            self._change(self._graph.operators[index].output, self._handed[index], self._home)
        sent = tuple(SentBytes(*key, size) for key, size in self._sent.items() if size)
        return HybridPrediction(self._total, sent, self._costs.settings, tuple(self._stages))

    def _hold(self, operator: Operator, layer: LayerPlan, costs: Costs, brought: float) -> None:
        """What a layer holds.

        Args:
            brought: bytes of inputs that were brought into the layout that it takes.
        """
        # Where an earlier operation holds the input, the layer's own work does not count it; in another layout it is
        # another tensor.
        trains = any(weight.trainable for weight in operator.weights)
        kept = max(float(costs[KEPT]), brought if trains else 0.0)
        # While the layer is computed backward, the gradients of its output and of its inputs are there.
        inputs = {edge.tensor: edge.value for edge in operator.inputs if edge.value.differentiable}
        lying = takes(operator, layer.signature)
        around = sum(self._local(value, lying) for value in inputs.values())
        around += self._local(operator.output, makes(operator, layer.signature))
        self._stages.append(MemoryStage(kept, float(costs[GRADIENTS]), 0.0, around))

    def _local(self, value: Value, states: States) -> float:
        """Bytes of a value on one rank."""
        return value.bytes * local_size(states, self._plan.mesh, value.batch_axis is not None)

    def _join(self, operator: Operator) -> States:
        """Add the changes at a join, where results in different layouts are brought into one, as in execution."""
        sources = [edge for edge in operator.inputs if edge.source != INPUT]
        states = unify([Placement(self._handed[edge.source]) for edge in sources])
        for edge in operator.inputs:
            self._bring(edge, states)
        return states

    def _take(self, operator: Operator, states: States) -> float:
        """Bytes of the operator's inputs that were brought into other states."""
        return sum(self._bring(edge, states) for edge in operator.inputs)

    def _bring(self, edge: Edge, states: States) -> float:
        """Bytes of a tensor that is brought into other states; it happens once for all operators that need it."""
        key = edge.source, edge.tensor, states
        if key in self._taken:
            return 0.0
        self._taken.add(key)
        value, lies = edge.value, self._home if edge.source == INPUT else self._handed[edge.source]
        if edge.source == INPUT:
            value = replace(value, differentiable=False)
        self._change(value, lies, states)
        return 0.0 if lies == states else self._local(value, states)

    def _change(self, value: Value, source: States, goal: States) -> None:
        if source == goal:
            return
        self._total += self._costs.change(value, (source,), (goal,))[0, 0]
        # A collective's result, and its copy in the order of the new layout.
        copies = 2 * max(self._local(value, source), self._local(value, goal))
        self._stages.append(MemoryStage(forward=copies, backward=copies if value.differentiable else 0.0))
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
            self._sent["gradients", dimensions, "all_reduce"] += size * sent("all_reduce", ranks)


def handed_on(operator: Operator, layer: LayerPlan) -> States:
    """The states in which a layer hands on its output."""
    asked = layer.output or (None,) * len(layer.signature)
    return tuple(operator.rules[name].handed_on(want) for name, want in zip(layer.signature, asked, strict=True))


@dataclass(frozen=True)
class MemoryStage:
    """The memory of one stage of the forward pass and of the same stage of the backward pass.

    Attributes:
        kept: bytes of results that are held from here until the backward pass has come back here.
        gradients: bytes of parameters' gradients that the backward pass makes here, and that stay.
        forward: bytes that are held only while this is computed in the forward pass.
        backward: the same in the backward pass.
    """

    kept: float = 0.0
    gradients: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


def peak_bytes(stages: Sequence[MemoryStage]) -> float:
    """The most bytes that are held at once; gradients of the step before are gone.

    Args:
        stages: of a step, in the order of the forward pass.
    """
    kept = list(accumulate((stage.kept for stage in stages), initial=0.0))
    made = list(accumulate((stage.gradients for stage in reversed(stages)), initial=0.0))[::-1]
    forward = (before + stage.kept + stage.forward for before, stage in zip(kept, stages, strict=False))
    # In the backward pass a stage's gradients are there before what it kept is gone.
    backward = (
        before + stage.kept + made[place] + stage.backward
        for place, (before, stage) in enumerate(zip(kept, stages, strict=False))
    )
    return max(made[0], *forward, *backward) if stages else 0.0
