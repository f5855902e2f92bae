"""Waiting rules of a server: a vector clock with bounded staleness, and the barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from lightning_autosync.documents import describe_validation_error
from lightning_autosync.errors import ExchangeError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.model_state import has_mean
from lightning_autosync.relaxed.server.gradients import Gradients, unpack_gradients
from lightning_autosync.relaxed.server.optimizer import Hyperparameters, check_settings
from lightning_autosync.relaxed.transport.messages import Mail
from lightning_autosync.relaxed.transport.payload import unpack


class StalenessClock:
    """Counts the steps of each party that a server has applied, and decides which party may read.

    A party that has pushed ``c`` steps may read, and so begin its step ``c``, once every party in the clock has pushed
    at least ``c - staleness`` steps. Its parameters then include all gradients of steps before ``c - staleness``, and
    no two parties are more than ``staleness + 1`` pushes apart. With ``staleness`` 0, all parties make each step
    together; with None, no party waits.

    Args:
        parties: the workers, or the nodes if a node pushes one sum.
        staleness: steps that a party may be ahead of the slowest; None for no limit.
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
        """Number of steps that the parameters represent: the sum of the weights of all pushes."""
        return self._progress

    @property
    def slowest(self) -> int:
        """The smallest number of steps of a party; without parties, the largest number that any party reached."""
        return min(self._steps.values(), default=self._furthest)

    def __contains__(self, party: int) -> bool:
        return party in self._steps

    def advance(self, party: int, weight: float) -> int:
        """Count one pushed step, which adds ``weight`` to the progress; returns the party's steps.

        Raises:
            KeyError: the party is not in the clock.
        """
        self._steps[party] += 1
        self._furthest = max(self._furthest, self._steps[party])
        self._progress += weight
        return self._steps[party]

    def may_read(self, party: int) -> bool:
        """Whether the party may begin its next step now; a party outside the clock always may."""
        if self.staleness is None or party not in self._steps:
            return True
        return self.slowest >= self._steps[party] - self.staleness

    def drop(self, party: int) -> None:
        """Remove a party that is lost or has no more data."""
        self._steps.pop(party, None)

    def add(self, party: int) -> int:
        """Add a party that starts or returns, at the steps of the slowest. Returns its steps."""
        self._steps[party] = self._steps.get(party, self.slowest)
        self._steps = dict(sorted(self._steps.items()))
        return self._steps[party]

    def align(self) -> int:
        """Set all parties, which are at a barrier, to the largest number of steps so far, and return it."""
        self._steps = dict.fromkeys(self._steps, self._furthest)
        return self._furthest

    def restore(self, step: int, progress: float) -> None:
        """Continue from a checkpoint, which was taken at a barrier."""
        self._steps = dict.fromkeys(self._steps, step)
        self._furthest, self._progress = step, progress


class Barrier:
    """The workers that have arrived at a barrier, and their buffers.

    Args:
        buffers: rank 0's initial buffers, by name.

    Attributes:
        buffers: buffers as of the last barrier, by name.
        passed: number of barriers so far.
        arrived: version of the parameters that each rank at the barrier has, by rank.
        met: ranks that were at the last barrier.
    """

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.buffers = buffers
        self.passed = 0
        self.arrived: dict[int, int] = {}
        self.met: frozenset[int] = frozenset()
        self._brought: dict[int, tuple[int, Mapping[str, Tensor]]] = {}

    def arrive(self, rank: int, samples: int, since: int, buffers: Mapping[str, Tensor]) -> None:
        """Add a worker that has version ``since``, with its samples since the last barrier and its buffers."""
        self.arrived[rank] = since
        self._brought[rank] = samples, buffers

    def forget(self, rank: int) -> None:
        """Remove a worker that is gone, with its buffers."""
        self.arrived.pop(rank, None)
        self._brought.pop(rank, None)

    def leave(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """Average the buffers and empty the barrier; returns the versions of the arrived ranks, and the averages."""
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
    """The mean weighted by samples; for a counter, the first value. Equal weights if no worker has samples."""
    # Workers without samples are left out: 0 times an infinity, as in a mask, would be NaN.
    given = [pair for pair in given if pair[0]] or given
    first = given[0][1]
    if len(given) == 1 or not has_mean(first):
        return first.clone()
    total = sum(samples for samples, _ in given)
    mean = torch.zeros_like(first, dtype=torch.complex128 if first.is_complex() else torch.float64)
    for samples, tensor in given:
        mean += (samples / total if total else 1 / len(given)) * tensor.to(mean.dtype)
    return mean.to(first.dtype)


@dataclass(frozen=True)
class Push:
    """The gradients that one worker pushed in one step.

    Attributes:
        workers: number of workers in the sum.
        settings: hyperparameters of the step.
        since: version of the parameters that the worker has; it gets what changed after it.
    """

    step: int
    gradients: Gradients
    workers: int
    settings: Hyperparameters
    since: int


class _Header(BaseModel):
    """The header of a push."""

    model_config = ConfigDict(strict=True, extra="forbid")

    step: NonNegativeInt
    workers: PositiveInt
    settings: list[dict[str, Any]]
    since: NonNegativeInt


def read_push(mail: Mail, shards: Mapping[int, Shard], settings: Hyperparameters) -> Push:
    """The push in a message.

    Everything that a worker sends is checked here, before the server's state can change: one worker must not end the
    server for all.

    Args:
        shards: shards of this server, by index.
        settings: hyperparameters with which the server began; those of a push must have the same form.

    Raises:
        ExchangeError: the header has a wrong value, or the gradients fit no shard.
    """
    try:
        header = _Header.model_validate(mail.header)
    except ValidationError as error:
        raise ExchangeError(f"header of a push: {describe_validation_error(error, mail.header)}") from None
    gradients = unpack_gradients(unpack(mail.payload), shards)
    check_settings(header.settings, settings)
    return Push(header.step, gradients, header.workers, header.settings, header.since)
