"""The network of this package's own simulator: message passing on a heterogeneous graph corrects the replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol

import numpy
import torch
from pydantic import Field
from torch import nn

from lightning_autosync.documents import Record
from lightning_autosync.learned.context import BUNDLES
from lightning_autosync.learned.graph import MESSAGES, NODES, PATH, RELATIONS, PlanGraph, encode_graph
from lightning_autosync.learned.networks import Layers, SimulatorNetwork, Standard, Width, load_dgl


class GraphBatch(NamedTuple):
    """A batch of graphs as one graph.

    Attributes:
        ends: [edges of all graphs] indices of the sources and of the targets, for each relation.
        features: [nodes of all graphs, features] by node type.
        weights: [edges of all graphs, 1] for each relation.
        counts: [graphs] number of nodes by node type.
        overall: [graphs, features] of the plans as a whole.
    """

    ends: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    features: dict[str, torch.Tensor]
    weights: tuple[torch.Tensor, ...]
    counts: dict[str, torch.Tensor]
    overall: torch.Tensor


def batch_graphs(items: Sequence[PlanGraph]) -> GraphBatch:
    """Join graphs into a batch; ends of edges are shifted by the number of nodes before them."""
    counts = {name: numpy.array([len(graph.nodes[place]) for graph in items]) for place, name in enumerate(NODES)}
    before = {name: numpy.cumsum(number) - number for name, number in counts.items()}
    ends, weights = [], []
    for place, relation in enumerate(RELATIONS):
        edges = [graph.edges[place] for graph in items]
        lengths = [len(edge.source) for edge in edges]
        source = numpy.concatenate([edge.source for edge in edges]) + numpy.repeat(before[relation[0]], lengths)
        target = numpy.concatenate([edge.target for edge in edges]) + numpy.repeat(before[relation[2]], lengths)
        ends.append((torch.from_numpy(source), torch.from_numpy(target)))
        weights.append(torch.from_numpy(numpy.concatenate([edge.weight for edge in edges]))[:, None])
    return GraphBatch(
        tuple(ends),
        {
            name: torch.from_numpy(numpy.concatenate([graph.nodes[place] for graph in items]))
            for place, name in enumerate(NODES)
        },
        tuple(weights),
        {name: torch.from_numpy(number) for name, number in counts.items()},
        torch.from_numpy(numpy.stack([graph.overall for graph in items])),
    )


class Sums(Protocol):
    """Sums over the edges and the nodes of a batch."""

    def gather(self, place: int, states: torch.Tensor, count: int) -> torch.Tensor:
        """[count targets, hidden] sums over the edges of relation ``place`` of weight times the source's state."""
        ...

    def pool(self, name: str, states: torch.Tensor, how: str) -> torch.Tensor:
        """[graphs, hidden] mean or maximum of the states of a type's nodes; 0 for a graph without such nodes."""
        ...


class TorchSums:
    """The sums by torch alone. They serve predictions, which so need no DGL."""

    def __init__(self, batch: GraphBatch) -> None:
        self._batch = batch

    def gather(self, place: int, states: torch.Tensor, count: int) -> torch.Tensor:
        source, target = self._batch.ends[place]
        return states.new_zeros(count, states.shape[1]).index_add(
            0, target, states[source] * self._batch.weights[place]
        )

    def pool(self, name: str, states: torch.Tensor, how: str) -> torch.Tensor:
        counts = self._batch.counts[name]
        graph = torch.repeat_interleave(torch.arange(len(counts)), counts)
        zeros = states.new_zeros(len(counts), states.shape[1])
        if how == "max":
            return zeros.scatter_reduce(0, graph[:, None].expand_as(states), states, "amax", include_self=False)
        return zeros.index_add(0, graph, states) / counts.clamp(min=1)[:, None]


class DGLSums:
    """The sums by DGL's fused kernels. They serve training: they keep no product for each edge for backward."""

    def __init__(self, batch: GraphBatch) -> None:
        self._batch, self._ops = batch, load_dgl().ops
        total = {name: int(number.sum()) for name, number in batch.counts.items()}
        graph = load_dgl().heterograph(dict(zip(RELATIONS, batch.ends, strict=True)), num_nodes_dict=total)
        self._relations = [graph[relation] for relation in RELATIONS]

    def gather(self, place: int, states: torch.Tensor, count: int) -> torch.Tensor:
        return self._ops.u_mul_e_sum(self._relations[place], states, self._batch.weights[place])

    def pool(self, name: str, states: torch.Tensor, how: str) -> torch.Tensor:
        counts = self._batch.counts[name]
        if how == "max":
            return self._ops.segment_reduce(counts, states, "max")
        return self._ops.segment_reduce(counts, states, "sum") / counts.clamp(min=1)[:, None]


_READ = (
    ("message", "mean"),
    ("message", "max"),
    ("shard", "mean"),
    ("device", "max"),
    ("link", "mean"),
    ("link", "max"),
)
"""Node types in the read-out, and how their states are pooled."""


class HeteroSizes(Record):
    """Sizes of `HeteroNetwork`.

    Attributes:
        hidden: width of a node's state.
        layers: number of convolution layers.
        dropout: dropout probability of the read-out, below 1.
    """

    hidden: Width = 32
    layers: Layers = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1


class HeteroNetwork(SimulatorNetwork):
    """A relational graph convolution (Schlichtkrull et al., 2018) with weighted edges and residual states.

    The last layer is initialized to zero, so that an untrained network predicts the replay's times.
    """

    KIND = "hetero"
    SIZES = HeteroSizes
    INPUTS = (*NODES, "overall")
    VOCABULARY = (1, NODES, RELATIONS, PATH, BUNDLES, MESSAGES)
    CORRECTS = True
    REGRESSION = 1.0
    TRAINED_BY_DGL = True
    encode = staticmethod(encode_graph)
    collate = staticmethod(batch_graphs)

    @staticmethod
    def features(item: PlanGraph) -> dict[str, int]:
        numbers = {name: nodes.shape[1] for name, nodes in zip(NODES, item.nodes, strict=True)}
        return {**numbers, "overall": len(item.overall)}

    def __init__(self, features: dict[str, int], sizes: HeteroSizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.standards = nn.ModuleDict({name: Standard(number) for name, number in features.items()})
        self.first = nn.ModuleDict({name: nn.Linear(features[name], hidden) for name in NODES})
        self.layers = nn.ModuleList(_Convolution(hidden) for _ in range(sizes.layers))
        width = len(_READ) * hidden + features["overall"]
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(
            nn.Dropout(sizes.dropout),
            nn.Linear(width, 2 * hidden),
            nn.SiLU(),
            nn.Linear(2 * hidden, hidden),
            nn.SiLU(),
            last,
        )

    def observe(self, batch: GraphBatch) -> None:
        for name, values in (*batch.features.items(), ("overall", batch.overall)):
            standard = self.standards[name]
            assert isinstance(standard, Standard)
            standard.observe(values)

    def embed(self, batch: GraphBatch) -> torch.Tensor:
        """[plans, width] pooled states and features of each plan as a whole; only training needs DGL."""
        return self.embed_by(DGLSums(batch) if self.training else TorchSums(batch), batch)

    def embed_by(self, sums: Sums, batch: GraphBatch) -> torch.Tensor:
        """The same with given sums of the batch."""
        states = {
            name: nn.functional.silu(self.first[name](self.standards[name](values)))
            for name, values in batch.features.items()
        }
        for layer in self.layers:
            states = layer(sums, states)
        parts = [sums.pool(name, states[name], how) for name, how in _READ]
        return torch.cat([*parts, self.standards["overall"](batch.overall)], dim=1)


class _Convolution(nn.Module):
    """Each node adds, by relation, the weighted sum of its neighbours' states."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.relations = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in RELATIONS)
        self.own = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in NODES})
        self.norms = nn.ModuleDict({name: nn.LayerNorm(hidden) for name in NODES})

    def forward(self, sums: Sums, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        taken = {name: self.own[name](state) for name, state in states.items()}
        for place, (source, _, target) in enumerate(RELATIONS):
            layer, state = self.relations[place], states[source]
            if len(state) > len(states[target]):  # the layer is linear: apply it on the side with fewer rows
                got = layer(sums.gather(place, state, len(states[target])))
            else:
                got = sums.gather(place, layer(state), len(states[target]))
            taken[target] = taken[target] + got
        return {
            name: self.norms[name](states[name] + nn.functional.silu(taken[name])) if name in taken else states[name]
            for name in states
        }
