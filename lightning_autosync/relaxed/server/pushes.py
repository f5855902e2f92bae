"""What workers push of a step, put together from its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.mesh import Mail
from lightning_autosync.relaxed.server.gradients import Gradients, unpack_gradients
from lightning_autosync.relaxed.server.rules import Hyperparameters
from lightning_autosync.relaxed.server.wire import unpack


@dataclass(frozen=True)
class Reader:
    """A worker that waits for parameters: the last version that it has in full, and the rows that it wants."""

    rank: int
    since: int
    wanted: dict[int, Tensor]


@dataclass
class Push:
    """What one worker has pushed of one step; complete when its last message and all before it are there."""

    step: int
    gradients: Gradients = field(default_factory=dict)
    received: int = 0
    expected: int | None = None
    workers: int = 0
    settings: Hyperparameters = field(default_factory=list)
    reader: Reader | None = None
    """Who gets the result; known with the last message."""

    @property
    def complete(self) -> bool:
        return self.received == self.expected


class Pushes:
    """Pushes that are on their way, one a worker.

    Args:
        shards: the server's own, by index.
    """

    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self._shards = shards
        self._of: dict[int, Push] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._of

    def take(self, mail: Mail) -> Push | None:
        """Add a message; the push, once it is complete.

        Raises:
            ExchangeError: it is not of the step that the worker is at, or holds what fits no shard.
        """
        rank, step = mail.sender, mail.header["step"]
        push = self._of.setdefault(rank, Push(step))
        if push.step != step:
            raise ExchangeError(f"rank {rank} pushed for step {step} in the middle of step {push.step}")
        message = unpack(mail.payload)
        last = mail.header.get("last")
        push.gradients.update(unpack_gradients(message, self._shards))
        push.received += 1
        if last is not None:
            wanted = {int(index): message.tensors[f"{index}.wanted"] for index in last["wanted"]}
            push.expected, push.workers, push.settings = last["pushes"], last["workers"], last["settings"]
            push.reader = Reader(rank, last["since"], wanted)
        return self._of.pop(rank) if push.complete else None

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._of.pop(rank, None)
