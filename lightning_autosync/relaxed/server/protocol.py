"""What workers and servers say to each other.

====================  ====================================================================================
worker to server
====================  ====================================================================================
``server.join``       I begin, or am back: give me the parameters
``server.setup``      you keep these shards, and this is how they are updated (rank 0, once)
``server.push``       gradients of some of your shards in a step; the last one of a step asks for the result
``server.finish``     my data has ended: wait for me no longer
``server.drain``      I stand at the barrier
``server.state``      give me your optimizer's state
``server.leave``      I need you no longer
--------------------  ------------------------------------------------------------------------------------
server to worker
--------------------  ------------------------------------------------------------------------------------
``worker.empty``      I keep nothing yet (to rank 0's join)
``worker.values``     parameters to begin a step with
``worker.drained``    parameters of the barrier at which all stand
``worker.extend``     others that you wait for at the barrier still push
``worker.state``      the optimizer's state
``worker.failed``     I cannot go on, and why
--------------------  ------------------------------------------------------------------------------------
worker to worker of the same node
--------------------  ------------------------------------------------------------------------------------
``node.push``         gradients of all shards for the one that pushes
``node.values``       what the servers answered
``node.finish``       my data has ended
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
    """What a server must know, as plain data.

    Attributes:
        layout: who keeps what.
        rule: the optimizer.
        staleness: steps that a party may run ahead; None for no limit.
        synchronous: whether a step's gradients are summed over all parties before they are applied.
        parties: the workers of each party: a worker alone, or those of a node; a party's number is its place here.
        step: where the clock begins.
        progress: where progress begins, in steps.
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
        shards: the server's own.
        replica: with the parameters to begin with.
        optimizer: the optimizer's state to begin with, by variable.
        buffers: those that it keeps.
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
