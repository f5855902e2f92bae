"""The kinds of learned simulators: what each sees of a plan, and the network that it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lightning_autosync.documents import Record, describe_validation_error
from lightning_autosync.learned.graph import NODES, encode_graph
from lightning_autosync.learned.hetero import HeteroNetwork, batch_graphs
from lightning_autosync.learned.networks import (
    AttentionNetwork,
    AttentionSizes,
    HeteroSizes,
    LinearNetwork,
    LinearSizes,
    Network,
    RecurrentNetwork,
    RecurrentSizes,
    collate_shard_graphs,
    collate_shards,
    collate_vectors,
)
from lightning_autosync.learned.predefined import predefined, shard_set
from lightning_autosync.learned.simulator import SimulatorError
from lightning_autosync.learned.traits import Traits


@dataclass(frozen=True)
class Kind:
    """A kind of simulator.

    Attributes:
        name: as in ``SIMULATORS``.
        encode: what it sees of a plan.
        collate: several of these as the network's input.
        features: how many features there are of each input of the network.
        inputs: names of these inputs.
        sizes: what its network takes.
        build: the network, from the numbers of features and its sizes.
        corrects: whether it adds to what the replay says, in logarithms; the others add to the least step's time,
            which is the same for all plans of a workload on a cluster.
        regression: weight of the error of the logarithm beside the ranking loss. The paper's simulators are trained to
            rank and no more (0); a straight line then brings their scores to seconds.
    """

    name: str
    encode: Callable[[Traits], Any]
    collate: Callable[[Sequence[Any]], Any]
    features: Callable[[Any], dict[str, int]]
    inputs: tuple[str, ...]
    sizes: type[Record]
    build: Callable[[dict[str, int], Any], Network]
    corrects: bool = False
    regression: float = 0.0

    def base(self, traits: Traits) -> float:
        """Logarithm of the seconds to which it adds."""
        return math.log(traits.prediction.step_time if self.corrects else traits.scene.scale)

    def sized(self, sizes: Mapping[str, Any]) -> Record:
        """Sizes from plain data; what is left out is at its default.

        Raises:
            SimulatorError: the first that is wrong, as ``network.SIZE``.
        """
        try:
            return self.sizes.model_validate(dict(sizes))
        except ValidationError as error:
            allowed = ", ".join(self.sizes.model_fields) or "no sizes"
            raise SimulatorError(f"network.{describe_validation_error(error)}; '{self.name}' takes {allowed}") from None

    def check_inputs(self, features: Collection[str]) -> None:
        """Refuse numbers of features that are not of just the inputs of its network.

        Raises:
            SimulatorError: one is missing or unknown.
        """
        if set(features) != set(self.inputs):
            found = ", ".join(features) or "none"
            raise SimulatorError(f"features: '{self.name}' has some of {', '.join(self.inputs)}; got {found}")

    def network(self, features: dict[str, int], sizes: Record) -> Network:
        """An untrained network, of what `sized` and `check_inputs` accept.

        Raises:
            SimulatorError: there is no memory for it, or DGL is missing.
        """
        try:
            return self.build(features, sizes)
        except RuntimeError as error:
            why = str(error).strip().partition("\n")[0]
            raise SimulatorError(f"simulator '{self.name}': network: {why}") from None


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
        Kind("linear", predefined, collate_vectors, _of_vector, ("plan",), LinearSizes, LinearNetwork),
        Kind("recurrent", shard_set, collate_shards, _of_shards, ("shard",), RecurrentSizes, RecurrentNetwork),
        Kind("attention", shard_set, collate_shard_graphs, _of_shards, ("shard",), AttentionSizes, AttentionNetwork),
        Kind(
            "hetero",
            encode_graph,
            batch_graphs,
            _of_graph,
            (*NODES, "overall"),
            HeteroSizes,
            HeteroNetwork,
            corrects=True,
            regression=1.0,
        ),
    )
}
"""By name."""
