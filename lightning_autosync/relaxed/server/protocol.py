"""Messages between workers and parameter servers.

====================  ====================================================================================
worker to server
====================  ====================================================================================
``server.join``       the worker starts or returns, and requests the parameters
``server.setup``      the shards of this server and their update rule (from rank 0, once)
``server.push``       the gradients of a step, and the request of the result
``server.finish``     the worker has no more data: do not wait for it
``server.drain``      the worker is at the barrier
``server.state``      request of the optimizer's state
``server.leave``      the worker no longer needs the server
--------------------  ------------------------------------------------------------------------------------
server to worker
--------------------  ------------------------------------------------------------------------------------
``worker.empty``      the server has no shards yet (answer to rank 0's join)
``worker.values``     parameters for the next step
``worker.drained``    parameters at the barrier, when all workers have arrived; sums of bits of whole tables
``worker.extend``     other workers, for which this one waits at the barrier, still push
``worker.state``      the optimizer's state
``worker.failed``     the server cannot continue, with the reason
--------------------  ------------------------------------------------------------------------------------
worker to worker of the same node
--------------------  ------------------------------------------------------------------------------------
``node.push``         gradients of all shards, for the worker that pushes the node's sum
``node.values``       an answer of a server, passed on
``node.finish``       the worker has no more data
====================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_autosync.errors import PlanError
from lightning_autosync.plan.servers import ServerLayout, Shard
from lightning_autosync.relaxed.server.optimizer import OptimizerRule, split
from lightning_autosync.relaxed.server.shards import ShardedModel
from lightning_autosync.relaxed.transport.payload import Packed, Part, pack

TO_SERVER = ("join", "setup", "push", "finish", "drain", "state", "leave")
TO_WORKER = ("empty", "values", "drained", "extend", "state", "failed")
TO_NODE = ("push", "values", "finish")


@dataclass(frozen=True)
class Setup:
    """The settings of a server, as plain data.

    Attributes:
        staleness: steps that a party may be ahead of the slowest; None for no limit.
        synchronous: whether a step's gradients are summed over all parties before they are applied.
        parties: ranks of each party, a single worker or the workers of a node; a party's number is its index here.
        step: initial step of the clock.
        progress: initial progress in steps.
    """

    layout: ServerLayout
    rule: OptimizerRule
    staleness: int | None
    synchronous: bool
    parties: tuple[tuple[int, ...], ...]
    step: int = 0
    progress: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Setup:
        plain = {name: data[name] for name in ("staleness", "synchronous", "step", "progress")}
        parties = tuple(tuple(members) for members in data["parties"])
        layout, rule = ServerLayout.from_dict(data["layout"]), OptimizerRule.from_dict(data["rule"])
        return cls(layout=layout, rule=rule, parties=parties, **plain)


def pack_setup(
    setup: Setup,
    shards: Iterable[Shard],
    model: ShardedModel,
    optimizer: Mapping[str, Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
) -> Packed:
    """The payload of ``server.setup``.

    Args:
        model: the model with the initial parameters.
        optimizer: initial state of the optimizer, by variable.
        buffers: buffers that the server keeps, by name.
    """
    shards = tuple(shards)
    tensors: dict[str, Part] = {f"values.{shard.index}": model.slices(shard) for shard in shards}
    states: list[list[Any]] = []
    for (variable, start, key), tensor in split(optimizer, shards).items():
        name = f"state.{len(states)}"
        states.append([name, variable, start, key])
        tensors[name] = tensor
    tensors |= {f"buffer.{name}": buffer for name, buffer in buffers.items()}
    return pack(tensors, {"setup": setup.to_dict(), "states": states})


def parties_of(layout: ServerLayout, nodes: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each party of the clock: a single worker, or the workers of a node.

    Raises:
        PlanError: the workers of a node push one sum, but ``nodes`` do not hold each worker once.
    """
    if not layout.local_aggregation:
        return tuple((rank,) for rank in range(layout.workers))
    parties = tuple(tuple(sorted(node)) for node in nodes or () if node)
    if sorted(rank for party in parties for rank in party) != list(range(layout.workers)):
        raise PlanError(
            f"nodes: local_aggregation needs each of the {layout.workers} workers in exactly one node; got {parties}"
        )
    return parties
