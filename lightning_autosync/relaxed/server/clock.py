"""Whom a server waits for: vector clocks with bounded staleness, and the barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.server.gradients import Gradients, unpack_gradients
from lightning_autosync.relaxed.server.optimizer import Hyperparameters
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import unpack


class StalenessClock:
    """How many steps of each party a server has applied, and who may read.

    A party that has pushed ``c`` steps may read, and so begin its step ``c``, once every party in the clock has
    pushed at least ``c - staleness``. So what it reads lacks no gradient of a step before ``c - staleness``, and no
    two parties are ever more than ``staleness + 1`` pushes apart. With ``staleness`` 0 all make each
    step together; with None nobody waits.

    Args:
        parties: the workers, or the nodes if a node pushes one sum.
        staleness: steps that a party may run ahead of the slowest; None for no limit.
    """

    def __init__(self, parties: Iterable[int], staleness: int | None) -> None:
        self.staleness = staleness
        self._steps = dict.fromkeys(sorted(parties), 0)
        self._progress = 0.0
        self._furthest = 0

    @property
    def parties(self) -> tuple[int, ...]:
        """The parties in the clock, ascending."""
        return tuple(self._steps)

    @property
    def steps(self) -> dict[int, int]:
        """Steps pushed, by party."""
        return dict(self._steps)

    @property
    def progress(self) -> float:
        """Steps that the parameters stand for: each push is a share of one, by the parties of its time."""
        return self._progress

    @property
    def slowest(self) -> int:
        """Fewest steps of any party; if none is left, the most that there ever were."""
        return min(self._steps.values(), default=self._furthest)

    def __contains__(self, party: int) -> bool:
        return party in self._steps

    def advance(self, party: int) -> int:
        """Count one pushed step; returns the party's steps.

        Raises:
            KeyError: the party is not in the clock.
        """
        self._steps[party] += 1
        self._furthest = max(self._furthest, self._steps[party])
        self._progress += 1.0 / len(self._steps)
        return self._steps[party]

    def may_read(self, party: int) -> bool:
        """Whether the party may begin its next step now; one that is not in the clock always may."""
        if self.staleness is None or party not in self._steps:
            return True
        return self.slowest >= self._steps[party] - self.staleness

    def drop(self, party: int) -> None:
        """Wait for a party no longer: it is lost, or its data has ended."""
        self._steps.pop(party, None)

    def add(self, party: int) -> int:
        """Take in a party that came (back); it begins with the slowest. Returns its steps."""
        self._steps[party] = self._steps.get(party, self.slowest)
        self._steps = dict(sorted(self._steps.items()))
        return self._steps[party]

    def align(self) -> int:
        """All parties stand at a barrier: they go on from the furthest step ever, which is returned."""
        self._steps = dict.fromkeys(self._steps, self._furthest)
        return self._furthest

    def restore(self, step: int, progress: float) -> None:
        """Begin where a checkpoint ended, at which all stood at a barrier."""
        self._steps = dict.fromkeys(self._steps, step)
        self._furthest, self._progress = step, progress


class Barrier:
    """The workers that have arrived at a barrier, and their buffers.

    Args:
        buffers: rank 0's at the beginning, by name.

    Attributes:
        buffers: as of the last barrier.
        passed: number of barriers so far.
        arrived: for each rank at the barrier, the version of the parameters that it has.
        met: the ranks that were at the last barrier.
    """

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.buffers = buffers
        self.passed = 0
        self.arrived: dict[int, int] = {}
        self.met: frozenset[int] = frozenset()
        self._brought: dict[int, tuple[int, Mapping[str, Tensor]]] = {}

    def arrive(self, rank: int, samples: int, since: int, buffers: Mapping[str, Tensor]) -> None:
        """A worker comes, after ``samples`` since the last barrier, with those of its buffers that count."""
        self.arrived[rank] = since
        self._brought[rank] = samples, buffers

    def forget(self, rank: int) -> None:
        """A worker is gone; what it brought counts no more."""
        self.arrived.pop(rank, None)
        self._brought.pop(rank, None)

    def leave(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """All are there: average what they brought, and begin anew; returns whom, their versions, and the averages."""
        averages = {}
        for name in self.buffers:
            given = [(samples, found[name]) for _, (samples, found) in sorted(self._brought.items()) if name in found]
            if given:
                averages[name] = _average(given)
        self.buffers |= averages
        arrived, self.arrived, self._brought = self.arrived, {}, {}
        self.met = frozenset(arrived)
        self.passed += 1
        return arrived, averages


def _average(given: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The mean weighted by samples; of a counter the first. A worker without samples counts only if none has any."""
    # Zero times an infinity, as in a mask, is not a number.
    given = [pair for pair in given if pair[0]] or given
    first = given[0][1]
    if len(given) == 1 or not first.is_floating_point():
        return first.clone()
    total = sum(samples for samples, _ in given)
    mean = torch.zeros_like(first, dtype=torch.float64)
    for samples, tensor in given:
        mean += (samples / total if total else 1 / len(given)) * tensor.double()
    return mean.to(first.dtype)


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
    """Pushes that are not complete, at most one a worker.

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
