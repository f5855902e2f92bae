"""The kinds of learned simulators: what each sees of a plan, and the network that it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_autosync.simulator.learned.batching import batch_graphs
from lightning_autosync.simulator.learned.files import SimulatorError
from lightning_autosync.simulator.learned.graph import NODES, encode_graph
from lightning_autosync.simulator.learned.hetero import HeteroNetwork
from lightning_autosync.simulator.learned.networks import (
    AttentionNetwork,
    LinearNetwork,
    Network,
    RecurrentNetwork,
    collate_shard_graphs,
    collate_shards,
    collate_vectors,
)
from lightning_autosync.simulator.learned.predefined import predefined, shard_set
from lightning_autosync.simulator.learned.traits import Traits


@dataclass(frozen=True)
class Kind:
    """A kind of simulator.

    Attributes:
        name: as in ``SIMULATORS``.
        encode: what it sees of a plan.
        collate: several of these as the network's input.
        features: how many features there are of each input of the network.
        build: the network, from these and its sizes.
        corrects: whether it adds to what the replay says, in logarithms; the others add to the least step's time,
            which is the same for all plans of a workload on a cluster.
        regression: weight of the error of the logarithm beside the ranking loss. The paper's simulators are trained to
            rank and no more (0); a straight line then brings their scores to seconds.
    """

    name: str
    encode: Callable[[Traits], Any]
    collate: Callable[[Sequence[Any]], Any]
    features: Callable[[Any], dict[str, int]]
    build: Callable[..., Network]
    corrects: bool = False
    regression: float = 0.0

    def base(self, traits: Traits) -> float:
        """Logarithm of the seconds to which it adds."""
        return math.log(traits.prediction.step_time if self.corrects else traits.scene.scale)

    def network(self, features: dict[str, int], sizes: dict[str, Any]) -> Network:
        """An untrained network.

        Raises:
            SimulatorError: it does not have such sizes, or DGL is missing.
        """
        try:
            return self.build(features, **sizes)
        except TypeError as error:
            raise SimulatorError(f"simulator '{self.name}': network: {error}") from None


def _of_vector(item: Any) -> dict[str, int]:
    return {"plan": item.shape[0]}


def _of_shards(item: Any) -> dict[str, int]:
    return {"shard": item.features.shape[1]}


def _of_graph(item: Any) -> dict[str, int]:
    numbers = {name: nodes.shape[1] for name, nodes in zip(NODES, item.nodes, strict=True)}
    return {**numbers, "overall": len(item.overall)}


KINDS = {
    kind.name: kind
    for kind in (
        Kind("linear", predefined, collate_vectors, _of_vector, LinearNetwork),
        Kind("recurrent", shard_set, collate_shards, _of_shards, RecurrentNetwork),
        Kind("attention", shard_set, collate_shard_graphs, _of_shards, AttentionNetwork),
        Kind("hetero", encode_graph, batch_graphs, _of_graph, HeteroNetwork, corrects=True, regression=1.0),
    )
}
"""By name."""
