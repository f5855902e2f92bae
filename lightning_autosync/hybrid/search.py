"""The search for plans: coordinate descent on each mesh of a cluster from several starts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.cost import Costs, LayerCosts, StepSettings, step_seconds
from lightning_autosync.hybrid.descent import Descent
from lightning_autosync.hybrid.exact import exact
from lightning_autosync.hybrid.graph import Graph
from lightning_autosync.hybrid.mesh import Links, near_order, shapes
from lightning_autosync.hybrid.plan import HybridPlan, Signature
from lightning_autosync.hybrid.prediction import predict_with
from lightning_autosync.hybrid.pricing import Pricing
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.hybrid.structure import Structure, structure
from lightning_autosync.hybrid.tables import ILLEGAL, Tables, plan_of, tables

_SHARES = (1.0, 0.8, 0.6)
"""Of the memory that there is, to which descents are held."""


@dataclass(frozen=True)
class HybridCandidate:
    """A plan and its predicted costs.

    Attributes:
        step_seconds: predicted seconds of a step.
        memory: predicted bytes on one rank.
        costs: [COSTS] components of the above; see `lightning_autosync.hybrid.cost`.
        origin: ``search``, ``data parallel`` or ``megatron``.
    """

    plan: HybridPlan
    step_seconds: float
    memory: float
    costs: Costs = field(repr=False, compare=False)
    origin: str


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        plans: the best plans that fit into memory, the fastest first; if none fits, the one with the least memory.
        data_parallel: data parallelism, with the whole model on every rank.
        megatron: the Megatron scheme on its best mesh: linear layers are cut alternately by output and input features.
            None if no mesh allows it.
    """

    plans: tuple[HybridCandidate, ...]
    data_parallel: HybridCandidate
    megatron: HybridCandidate | None

    @property
    def best(self) -> HybridCandidate:
        return self.plans[0]


def search(
    graph: Graph,
    cluster: ClusterSpec,
    rates: HybridRates | None = None,
    *,
    memory: float | None = None,
    settings: StepSettings | None = None,
    starts: int = 4,
    keep: int = 5,
    seed: int = 0,
    meshes: Sequence[tuple[int, ...]] | None = None,
) -> Found:
    """Search the best plans for a model on a cluster; also returns data parallelism and the Megatron scheme.

    Args:
        cluster: a cluster with known rates.
        rates: rates of the hosts and the backend; None takes the defaults.
        memory: bytes that a rank may use; None for no limit.
        settings: settings of the step; None takes the defaults.
        starts: number of random starts of the descent on each mesh. Further starts are data parallelism, the Megatron
            scheme and the best plan without overlap.
        keep: largest number of returned plans.
        meshes: shapes of the meshes to try; None tries all with up to three dimensions.

    Raises:
        ClusterError: the rates of the links are unknown.
    """
    cluster.require_measured()
    return _Search(graph, cluster, rates or HybridRates(), memory, settings or StepSettings(), starts, keep, seed).run(
        meshes or shapes(cluster.world_size)
    )


class _Choice:
    """One alternative for each choice on one mesh, with its costs."""

    def __init__(self, on_mesh: Tables, states: tuple[int, ...], origin: str) -> None:
        self.on_mesh, self.states, self.origin = on_mesh, states, origin
        self.costs = on_mesh.total(states)
        self.seconds = float(step_seconds(self.costs, on_mesh.costs.settings.overlap))

    @cached_property
    def plan(self) -> HybridPlan:
        return plan_of(self.on_mesh, self.states)

    @cached_property
    def memory(self) -> float:
        """Bytes on one rank, followed through a step."""
        return predict_with(self.on_mesh.costs, self.plan, self.on_mesh.structure.graph).memory


class _Search:
    def __init__(
        self,
        graph: Graph,
        cluster: ClusterSpec,
        rates: HybridRates,
        memory: float | None,
        settings: StepSettings,
        starts: int,
        keep: int,
        seed: int,
    ) -> None:
        self._structure = structure(graph)
        self._links, self._ranks = Links(cluster), near_order(cluster)
        self._rates, self._memory, self._settings = rates, memory, settings
        self._starts, self._keep, self._random = starts, keep, random.Random(seed)

    def run(self, meshes: Sequence[tuple[int, ...]]) -> Found:
        flat = self._tables((len(self._ranks),))
        data_parallel = self._candidate(_Choice(flat, _all(flat, "dp"), "data parallel"))
        chosen: list[_Choice] = []
        for mesh in meshes:
            on_mesh = self._tables(mesh)
            megatron = self._megatron(on_mesh) if len(mesh) < 3 else None
            if megatron is not None:
                chosen.append(_Choice(on_mesh, megatron, "megatron"))
            chosen += [_Choice(on_mesh, choice, "search") for choice in self._descents(on_mesh, megatron)]
        chosen.sort(key=self._order)
        alternations = [choice for choice in chosen if choice.origin == "megatron"]
        megatron_plan = self._candidate(alternations[0]) if alternations else None
        return Found(tuple(self._best(chosen, data_parallel)), data_parallel, megatron_plan)

    def _best(self, chosen: Sequence[_Choice], data_parallel: HybridCandidate) -> list[HybridCandidate]:
        """The best distinct plans, including data parallelism: those that fit, or the first if none fits."""
        found = {data_parallel.plan.fingerprint: data_parallel} if self._fits(data_parallel) else {}
        for choice in chosen:
            if len(found) > self._keep or (found and not self._fits(choice)):
                break
            candidate = self._candidate(choice)
            # Data parallelism is the same on all meshes, and is in the result already if it fits.
            if not candidate.plan.is_data_parallel:
                found.setdefault(candidate.plan.fingerprint, candidate)
        ranked = sorted(found.values(), key=lambda candidate: candidate.step_seconds)
        return ranked[: self._keep] or [data_parallel]

    def _order(self, choice: _Choice) -> tuple[bool, float]:
        """Sort key: plans that fit come first, by seconds; then the others, by memory."""
        fits = self._fits(choice)
        return not fits, choice.seconds if fits else choice.memory

    def _tables(self, mesh: tuple[int, ...]) -> Tables:
        pricing = Pricing(mesh, self._ranks, self._links, self._rates)
        return tables(self._structure, LayerCosts(pricing, self._settings))

    def _fits(self, choice: _Choice | HybridCandidate) -> bool:
        return self._memory is None or choice.memory <= self._memory

    def _candidate(self, choice: _Choice) -> HybridCandidate:
        return HybridCandidate(choice.plan, choice.seconds, choice.memory, choice.costs, choice.origin)

    def _descents(self, on_mesh: Tables, megatron: Sequence[int] | None) -> Iterator[tuple[int, ...]]:
        # Costs that add up tell memory about, so what descents find to fit may need more, and the other way round.
        memory = self._memory
        limits = [None, *([] if memory is None else [share * memory for share in _SHARES])]
        starts: list[Sequence[int]] = [_all(on_mesh, "dp"), *([] if megatron is None else [megatron])]
        # The best plan without overlap is a good start. The exact search may be too large, and then is left out.
        with suppress(PlanError):
            starts.append(exact(on_mesh)[0])
        starts += [self._drawn(on_mesh) for _ in range(self._starts)]
        for limit, start in product(limits, starts):
            choice, _ = Descent(on_mesh, limit, self._settings.overlap).run(start)
            if step_seconds(on_mesh.total(choice)) < ILLEGAL:
                yield choice

    def _drawn(self, on_mesh: Tables) -> list[int]:
        return [self._random.randrange(len(table)) for table in on_mesh.alone]

    def _megatron(self, on_mesh: Tables) -> tuple[int, ...] | None:
        """The Megatron scheme along the last dimension; the descent optimizes all other choices.

        Returns None if no layer can be split in this way.
        """
        mesh = on_mesh.costs.pricing.mesh
        pattern = _alternation(self._structure)
        start, fixed = list(_all(on_mesh, "dp")), []
        for layer, name in pattern.items():
            wanted = (*("dp",) * (len(mesh) - 1), name)
            if wanted in on_mesh.signatures[layer]:
                start[layer] = on_mesh.signatures[layer].index(wanted)
                fixed.append(layer)
        if not fixed:
            return None
        choice, _ = Descent(on_mesh, self._memory, self._settings.overlap, fixed).run(start)
        return choice if step_seconds(on_mesh.total(choice)) < ILLEGAL else None


def _all(on_mesh: Tables, name: Signature) -> tuple[int, ...]:
    """The choice of one signature for all layers along all dimensions, with all values cut by samples."""
    wanted = (name,) * len(on_mesh.costs.pricing.mesh)
    layers = [alternatives.index(wanted) for alternatives in on_mesh.signatures]
    return (*layers, *[0] * (len(on_mesh.alone) - on_mesh.layers))


def _alternation(of: Structure) -> dict[int, Signature]:
    """The signatures of the Megatron scheme by layer: ``col`` and ``row`` alternately, and ``heads`` for attention."""
    operators = of.graph.operators
    pattern: dict[int, Signature] = {}
    for layer, members in enumerate(of.layers):
        operator = operators[members[0]]
        if operator.kind == "attention":
            pattern[layer] = "heads"
        elif operator.kind in ("linear", "transposed_linear"):
            # A layer that can take the pieces of features of a ``col`` layer directly sums over them (``row``).
            feeding = [flow for flow in of.flows if flow.target == layer and flow.source is not None]
            after_column = any(pattern.get(flow.source) == "col" for flow in feeding if flow.source is not None)
            pattern[layer] = "row" if after_column and all(flow.units > 1 for flow in feeding) else "col"
    return pattern
