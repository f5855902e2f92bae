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
``worker.patience``   others that you wait for at the barrier still push
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

import queue
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_autosync.errors import MeshTimeout
from lightning_autosync.plan.servers import ServerLayout
from lightning_autosync.relaxed.mesh import Mail, Mesh
from lightning_autosync.relaxed.server.rules import OptimizerRule

TO_SERVER = ("join", "setup", "push", "finish", "drain", "state", "leave")
TO_WORKER = ("empty", "values", "drained", "patience", "state", "failed")
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


class Absence(NamedTuple):
    """A process is gone: lost, or (``lost`` is False) it closed its mesh in good order."""

    rank: int
    why: str
    lost: bool


Event = Mail | Absence


class Post:
    """Everything that concerns one server or one worker, in the order in which it happened.

    Args:
        mesh: the mesh.
        kinds: by prefix, the kinds of messages to take.
    """

    def __init__(self, mesh: Mesh, kinds: Mapping[str, Sequence[str]]) -> None:
        self._mesh = mesh
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._subscriptions = ExitStack()
        for prefix, names in kinds.items():
            for name in names:
                self._subscriptions.callback(mesh.subscribe(f"{prefix}.{name}", self._events.put))
        self._subscriptions.callback(mesh.on_loss(lambda rank, why: self._events.put(Absence(rank, why, True))))
        closed = mesh.on_leave(lambda rank: self._events.put(Absence(rank, "it has closed", False)))
        self._subscriptions.callback(closed)
        for rank in set(range(mesh.size)) - mesh.live:
            self._events.put(Absence(rank, "it was gone at the beginning", rank not in mesh.left))

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event; None after `wake`.

        Raises:
            MeshTimeout: nothing happened in ``timeout`` seconds.
        """
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            raise MeshTimeout(f"nothing came in {timeout:g} s") from None

    def close(self) -> None:
        """Take nothing more; may be called again."""
        self._subscriptions.close()

    def wake(self) -> None:
        """Let whoever waits in `next` go."""
        self._events.put(None)

    def send(
        self, peer: int, kind: str, header: Mapping[str, Any] | None = None, parts: Sequence[memoryview | Tensor] = ()
    ) -> None:
        """As `Mesh.send`; the parts must stay as they are until the peer answers or is gone."""
        self._mesh.send(peer, kind, header or {}, parts)


class Deadline:
    """A time-out that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin anew."""
        self._end = time.monotonic() + self.seconds

    @property
    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())
