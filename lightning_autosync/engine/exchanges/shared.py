"""Dense messages in memory that all ranks map: each rank sums its part of all buffers, for everybody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.handover import Handover
from lightning_autosync.plan.schedule import Message, SharedMemoryReduce

CHUNK = 256 * 1024
"""Bytes that are summed and handed out while they lie in a core's cache."""


class SharedMemoryExchange(Exchange):
    """Sums the buffers of all ranks into one result: no byte crosses a socket.

    Once all ranks have filled their buffers, each adds up its own part of all of them, in rank order, and writes the
    sum into the result. Once all ranks have, each reads the result. It is written to again only when all ranks have
    filled their buffers for the next step, and so have read it.

    Args:
        message: the message, summed in one round.
        buffers: [numel + tail] of every rank, in rank order; views of the shared memory.
        result: [numel + tail], in the shared memory too.
        rank: this rank.
        handover: tells the ranks how far the others are.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self,
        message: Message,
        buffers: Sequence[Tensor],
        result: Tensor,
        rank: int,
        handover: Handover,
        timeout: float,
    ) -> None:
        self.result = result
        self._filled, self._summed = 2 * message.index, 2 * message.index + 1
        self._handover = handover
        self._what = f"message '{message.name}'"
        self._timeout = timeout
        self._step = 0
        length = max(1, CHUNK // buffers[0].itemsize)
        self._chunks = [
            [part[start : min(start + length, stop)] for part in (result, *buffers)]
            for lower, stop in _parts(message, rank)
            for start in range(lower, stop, length)
        ]

    def start(self) -> None:
        self._step += 1
        self._handover.announce(self._filled, self._step)

    def resume(self) -> None:
        self._handover.wait(self._filled, self._step, self._what, self._timeout)
        for total, first, *others in self._chunks:
            if not others:
                total.copy_(first)
                continue
            torch.add(first, others[0], out=total)
            for other in others[1:]:
                total.add_(other)
        self._handover.announce(self._summed, self._step)

    def wait(self) -> None:
        self._handover.wait(self._summed, self._step, self._what, self._timeout)


def _parts(message: Message, rank: int) -> list[tuple[int, int]]:
    """The ranges of elements that a rank sums."""
    (single,) = message.rounds
    shared = [transfer for transfer in single.transfers if isinstance(transfer, SharedMemoryReduce)]
    return [(transfer.bounds[rank], transfer.bounds[rank + 1]) for transfer in shared]
