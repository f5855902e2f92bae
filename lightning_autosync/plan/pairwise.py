"""Sums by exchanges between pairs of ranks: as few of them after each other as possible, for small messages.

(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

Span = tuple[int, int]
"""First element and end (exclusive) of a range."""


class Kind(Enum):
    """What the two ranks of a pair send each other.

    ``WHOLE``: what each has summed. ``HALVE``: the half of it that the other one goes on with. ``GATHER``: their parts
    of the sum over all ranks. ``FOLD``: the lower rank sends its contribution, and waits for ``UNFOLD``, the sum.
    """

    FOLD = 0
    WHOLE = 1
    HALVE = 2
    GATHER = 3
    UNFOLD = 4


class Swap(NamedTuple):
    """An exchange between the ranks of each pair, of all pairs at the same time.

    Attributes:
        kind: what they send.
        share: share of a piece that a rank sends.
        parents: [ranks] the upper rank of a pair at the place of the lower one; -1 elsewhere, as at roots of trees.
        partners: [ranks] the other rank of the pair; -1 for ranks without a pair.
    """

    kind: Kind
    share: float
    parents: tuple[int, ...]
    partners: tuple[int, ...]

    @property
    def rises(self) -> bool:
        """Whether lower ranks send to upper ones."""
        return self.kind != Kind.UNFOLD

    @property
    def falls(self) -> bool:
        """Whether upper ranks send to lower ones."""
        return self.kind != Kind.FOLD

    @property
    def sending(self) -> Iterator[tuple[int, int]]:
        """The sender and the receiver of each message."""
        for lower, upper in enumerate(self.parents):
            if upper >= 0:
                yield from [(lower, upper)] * self.rises + [(upper, lower)] * self.falls

    @property
    def adds(self) -> bool:
        """Whether a rank adds what it receives; otherwise that is the sum over all ranks."""
        return self.kind in (Kind.FOLD, Kind.WHOLE, Kind.HALVE)


class Turn(NamedTuple):
    """A rank's part in an exchange.

    Attributes:
        number: index of the exchange.
        peer: the other rank.
        sends, receives: the ranges that the rank sends and receives; None for none.
        adds: as in `Swap`.
    """

    number: int
    peer: int
    sends: Span | None
    receives: Span | None
    adds: bool


@dataclass(frozen=True)
class PairwiseReduce:
    """Elements ``[start, stop)``, summed by exchanges between ranks at distances 1, 2, 4 and so on in ``order``.

    The range travels in pieces of ``segment`` elements, each by itself. In an exchange of recursive doubling, both
    ranks send all that they have summed. With ``halves``, they send one half, add up the other half, and go on with
    that; then the same exchanges in the opposite order gather the parts of the sum (Rabenseifner's algorithm).

    Where the number of ranks is no power of two, the first ranks of ``order`` form pairs. One rank of each pair sends
    its contribution to the other one before the exchanges, and gets the sum after them.
    """

    start: int
    stop: int
    segment: int
    order: tuple[int, ...]
    halves: bool

    @property
    def pieces(self) -> Iterator[Span]:
        return ((start, min(start + self.segment, self.stop)) for start in range(self.start, self.stop, self.segment))

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """The exchanges, first to last."""
        return _swaps(self.order, self.halves)

    def turns(self, rank: int, piece: Span) -> list[Turn]:
        """What a rank sends and receives of a piece, first to last."""
        turns: list[Turn] = []
        halves: list[tuple[Span, Span]] = []
        sends: Span | None
        receives: Span | None
        for number, swap in enumerate(self.swaps):
            is_lower = swap.parents[rank] >= 0
            if swap.kind == Kind.HALVE:
                start, stop = halves[-1][0] if halves else piece
                middle = (start + stop) // 2
                kept, given = (start, middle), (middle, stop)
                halves.append((kept, given) if is_lower else (given, kept))
                receives, sends = halves[-1]
            elif swap.kind == Kind.GATHER:
                sends, receives = halves.pop()
            else:
                sends = piece if (swap.rises if is_lower else swap.falls) else None
                receives = piece if (swap.falls if is_lower else swap.rises) else None
            if swap.partners[rank] >= 0:
                turns.append(Turn(number, swap.partners[rank], sends, receives, swap.adds))
        return turns


@lru_cache(maxsize=256)
def _swaps(order: tuple[int, ...], halves: bool) -> tuple[Swap, ...]:
    ranks = len(order)
    beyond = ranks - (1 << ranks.bit_length() - 1)
    outer, partners = order[: 2 * beyond : 2], order[1 : 2 * beyond : 2]
    inner = partners + order[2 * beyond :]
    swaps = []
    distance = 1
    while distance < len(inner):
        lower = [place for place in range(len(inner)) if not place & distance]
        pairs = [(inner[place], inner[place + distance]) for place in lower]
        swaps.append(_swap(Kind.HALVE if halves else Kind.WHOLE, 0.5 / distance if halves else 1.0, pairs, ranks))
        distance *= 2
    if halves:
        swaps += [swap._replace(kind=Kind.GATHER) for swap in reversed(swaps)]
    if beyond:
        fold = _swap(Kind.FOLD, 1.0, list(zip(outer, partners, strict=True)), ranks)
        swaps = [fold, *swaps, fold._replace(kind=Kind.UNFOLD)]
    return tuple(swaps)


def _swap(kind: Kind, share: float, pairs: Sequence[tuple[int, int]], ranks: int) -> Swap:
    parents, partners = [-1] * ranks, [-1] * ranks
    for lower, upper in pairs:
        parents[lower] = partners[lower] = upper
        partners[upper] = lower
    return Swap(kind, share, tuple(parents), tuple(partners))
