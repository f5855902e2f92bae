"""The network of this package's own simulator: message passing on a heterogeneous graph corrects the replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy
import torch
from pydantic import Field
from torch import nn

from lightning_autosync.documents import Record
from lightning_autosync.learned.graph import NODES, RELATIONS, PlanGraph, encode_graph
from lightning_autosync.learned.networks import Layers, SimulatorNetwork, Standard, Width, load_dgl


class GraphBatch(NamedTuple):
    """A batch of graphs as one graph.

    Attributes:
        graph: a ``dgl.DGLGraph`` with `NODES` and `RELATIONS`.
        features: [nodes of all graphs, features] by node type.
        weights: [edges of all graphs, 1] for each relation.
        counts: [graphs] number of nodes by node type.
        overall: [graphs, features] of the plans as a whole.
    """

    graph: Any
    features: dict[str, torch.Tensor]
    weights: tuple[torch.Tensor, ...]
    counts: dict[str, torch.Tensor]
    overall: torch.Tensor


def batch_graphs(items: Sequence[PlanGraph]) -> GraphBatch:
    """Join graphs into a batch; ends of edges are shifted by the number of nodes before them."""
    counts = {name: numpy.array([len(graph.nodes[place]) for graph in items]) for place, name in enumerate(NODES)}
    before = {name: numpy.cumsum(number) - number for name, number in counts.items()}
    ends, weights = {}, []
    for place, relation in enumerate(RELATIONS):
        edges = [graph.edges[place] for graph in items]
        lengths = [len(edge.source) for edge in edges]
        source = numpy.concatenate([edge.source for edge in edges]) + numpy.repeat(before[relation[0]], lengths)
        target = numpy.concatenate([edge.target for edge in edges]) + numpy.repeat(before[relation[2]], lengths)
        ends[relation] = torch.from_numpy(source), torch.from_numpy(target)
        weights.append(torch.from_numpy(numpy.concatenate([edge.weight for edge in edges]))[:, None])
    total = {name: int(number.sum()) for name, number in counts.items()}
    return GraphBatch(
        load_dgl().heterograph(ends, num_nodes_dict=total),
        {
            name: torch.from_numpy(numpy.concatenate([graph.nodes[place] for graph in items]))
            for place, name in enumerate(NODES)
        },
        tuple(weights),
        {name: torch.from_numpy(number) for name, number in counts.items()},
        torch.from_numpy(numpy.stack([graph.overall for graph in items])),
    )


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
    CORRECTS = True
    REGRESSION = 1.0
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
        """[plans, width] pooled states and features of each plan as a whole."""
        states = {
            name: nn.functional.silu(self.first[name](self.standards[name](values)))
            for name, values in batch.features.items()
        }
        relations = [batch.graph[relation] for relation in RELATIONS]
        for layer in self.layers:
            states = layer(relations, batch.weights, states)
        parts = [_pool(batch.counts[name], states[name], how) for name, how in _READ]
        return torch.cat([*parts, self.standards["overall"](batch.overall)], dim=1)


def _pool(counts: torch.Tensor, states: torch.Tensor, how: str) -> torch.Tensor:
    """[graphs, hidden] mean or maximum of the states of each graph; 0 for a graph without such nodes."""
    reduce = load_dgl().ops.segment_reduce
    if how == "max":
        most: torch.Tensor = reduce(counts, states, "max")
        return most
    total: torch.Tensor = reduce(counts, states, "sum")
    return total / counts.clamp(min=1)[:, None]


class _Convolution(nn.Module):
    """Each node adds, by relation, the weighted sum of its neighbours' states."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.relations = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in RELATIONS)
        self.own = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in NODES})
        self.norms = nn.ModuleDict({name: nn.LayerNorm(hidden) for name in NODES})

    def forward(
        self, relations: list[Any], weights: tuple[torch.Tensor, ...], states: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        gather = load_dgl().ops.u_mul_e_sum
        taken = {name: self.own[name](state) for name, state in states.items()}
        for place, (source, _, target) in enumerate(RELATIONS):
            layer, state = self.relations[place], states[source]
            if len(state) > len(states[target]):  # the layer is linear: apply it on the side with fewer rows
                got = layer(gather(relations[place], state, weights[place]))
            else:
                got = gather(relations[place], layer(state), weights[place])
            taken[target] = taken[target] + got
        return {
            name: self.norms[name](states[name] + nn.functional.silu(taken[name])) if name in taken else states[name]
            for name in states
        }
