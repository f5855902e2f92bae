"""What the first worker tells servers to keep, and who pushes together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_autosync.errors import PlanError
from lightning_autosync.plan.servers import ServerLayout, Shard
from lightning_autosync.relaxed.server import checkpoint
from lightning_autosync.relaxed.server.protocol import Setup
from lightning_autosync.relaxed.server.replica import Replica
from lightning_autosync.relaxed.server.wire import Packed, Part, pack


def pack_setup(
    setup: Setup,
    shards: Iterable[Shard],
    replica: Replica,
    optimizer: Mapping[str, Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
) -> Packed:
    """The payload of ``server.setup``.

    Args:
        shards: the server's own.
        replica: with the parameters to begin with.
        optimizer: the optimizer's state to begin with, by variable.
        buffers: those that it keeps.
    """
    shards = tuple(shards)
    tensors: dict[str, Part] = {f"values.{shard.index}": replica.slices(shard) for shard in shards}
    states: list[list[Any]] = []
    for (variable, start, key), tensor in checkpoint.split(optimizer, shards).items():
        name = f"state.{len(states)}"
        states.append([name, variable, start, key])
        tensors[name] = tensor
    tensors |= {f"buffer.{name}": buffer for name, buffer in buffers.items()}
    return pack(tensors, {"setup": setup.to_dict(), "states": states})


def parties_of(layout: ServerLayout, nodes: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """The workers of each party of the clock: a worker alone, or those of a node.

    Raises:
        PlanError: workers of a node push together, and the nodes are not known.
    """
    if not layout.local_aggregation:
        return tuple((rank,) for rank in range(layout.workers))
    parties = tuple(tuple(sorted(node)) for node in nodes or () if node)
    if sorted(rank for party in parties for rank in party) != list(range(layout.workers)):
        raise PlanError(
            f"nodes: local_aggregation needs the node of each of {layout.workers} workers, once; got {parties}"
        )
    return parties
