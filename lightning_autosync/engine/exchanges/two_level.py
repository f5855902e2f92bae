"""Dense messages by collectives in two levels, on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.plan.schedule import TwoLevelAllReduce


@dataclass(frozen=True)
class TwoLevelGroups:
    """The process groups of one rank: the ranks of its place, and those of its seat in all places."""

    place: dist.ProcessGroup
    rail: dist.ProcessGroup
    seats: int


_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], TwoLevelGroups]] = WeakKeyDictionary()
"""By default group: nobody gives process groups back, so engines that follow each other share theirs."""


def two_level_groups(places: Sequence[Sequence[int]], timeout: float) -> TwoLevelGroups:
    """The groups of all places and seats, made once in the default process group's life; collective the first time.

    Args:
        places: the ranks of each.
        timeout: seconds that ranks wait for each other, where the groups are made now.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    key = tuple(tuple(ranks) for ranks in places)
    if key not in made:
        made[key] = _make(key, timedelta(seconds=timeout))
    return made[key]


def _make(places: Sequence[Sequence[int]], timeout: timedelta) -> TwoLevelGroups:
    rank = dist.get_rank()
    seats = len(places[0])
    # Every rank makes every group, in one order, and keeps its own two.
    inner = {tuple(ranks): dist.new_group(list(ranks), timeout) for ranks in places}
    rails = [tuple(ranks[seat] for ranks in places) for seat in range(seats)]
    outer = {ranks: dist.new_group(list(ranks), timeout) for ranks in rails}
    return TwoLevelGroups(
        place=next(group for ranks, group in inner.items() if rank in ranks),
        rail=next(group for ranks, group in outer.items() if rank in ranks),
        seats=seats,
    )


class TwoLevelExchange(Exchange):
    """Reduce-scatter inside a place, all-reduce between places, all-gather inside.

    On CUDA the three follow each other on a side stream, so that backward goes on; elsewhere ``start`` blocks.
    """

    def __init__(self, transfers: Sequence[TwoLevelAllReduce], buffer: Tensor, groups: TwoLevelGroups) -> None:
        self._groups = groups
        self._parts = [_Part(buffer[transfer.start : transfer.stop], groups.seats) for transfer in transfers]
        self._stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None

    def start(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._beside():
            for part in self._parts:
                part.reduce(self._groups)

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


class _Part:
    """A range, padded so that every seat of a place takes an equal share."""

    def __init__(self, values: Tensor, seats: int) -> None:
        share = -(-values.numel() // seats)
        self._values = values
        self._padded = values if share * seats == values.numel() else values.new_zeros(share * seats)
        self._share = values.new_zeros(share)

    def reduce(self, groups: TwoLevelGroups) -> None:
        if self._padded is not self._values:
            self._padded[: self._values.numel()] = self._values
        dist.reduce_scatter_tensor(self._share, self._padded, group=groups.place)
        dist.all_reduce(self._share, group=groups.rail)
        dist.all_gather_into_tensor(self._padded, self._share, group=groups.place)
        if self._padded is not self._values:
            self._values.copy_(self._padded[: self._values.numel()])
