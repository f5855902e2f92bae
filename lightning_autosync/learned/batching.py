"""Many graphs as one DGL graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch

from lightning_autosync.learned.backend import load_dgl
from lightning_autosync.learned.graph import NODES, RELATIONS, Graph


class GraphBatch(NamedTuple):
    """Several graphs side by side.

    Attributes:
        graph: a ``dgl.DGLGraph`` with `NODES` and `RELATIONS`.
        features: for each node type [nodes of all graphs, features].
        weights: for each relation [edges of all graphs, 1].
        counts: for each node type [graphs] nodes of each graph.
        overall: [graphs, features].
    """

    graph: Any
    features: dict[str, torch.Tensor]
    weights: tuple[torch.Tensor, ...]
    counts: dict[str, torch.Tensor]
    overall: torch.Tensor


def batch_graphs(graphs: Sequence[Graph]) -> GraphBatch:
    """Put graphs side by side; edges are moved on by the nodes of the graphs before."""
    counts = {name: numpy.array([len(graph.nodes[place]) for graph in graphs]) for place, name in enumerate(NODES)}
    before = {name: numpy.cumsum(number) - number for name, number in counts.items()}
    ends, weights = {}, []
    for place, relation in enumerate(RELATIONS):
        edges = [graph.edges[place] for graph in graphs]
        lengths = [len(edge.source) for edge in edges]
        source = numpy.concatenate([edge.source for edge in edges]) + numpy.repeat(before[relation[0]], lengths)
        target = numpy.concatenate([edge.target for edge in edges]) + numpy.repeat(before[relation[2]], lengths)
        ends[relation] = torch.from_numpy(source), torch.from_numpy(target)
        weights.append(torch.from_numpy(numpy.concatenate([edge.weight for edge in edges]))[:, None])
    total = {name: int(number.sum()) for name, number in counts.items()}
    return GraphBatch(
        load_dgl().heterograph(ends, num_nodes_dict=total),
        {
            name: torch.from_numpy(numpy.concatenate([graph.nodes[place] for graph in graphs]))
            for place, name in enumerate(NODES)
        },
        tuple(weights),
        {name: torch.from_numpy(number) for name, number in counts.items()},
        torch.from_numpy(numpy.stack([graph.overall for graph in graphs])),
    )
