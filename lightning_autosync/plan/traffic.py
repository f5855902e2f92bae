"""Bytes that each rank sends in a step of a schedule."""

from __future__ import annotations

from collections import Counter
from functools import partial

from lightning_autosync.plan import codecs
from lightning_autosync.plan.messages import ITEMSIZE
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    Round,
    Schedule,
    Transfer,
    TreeTransfer,
    TwoLevelAllReduce,
)


def sent_bytes(schedule: Schedule) -> list[float] | None:
    """[ranks] bytes that each rank sends to other ranks in a step, encoded, without headers.

    A native all-reduce is counted as a ring, which sends ``2 (n - 1) / n`` of the message from every rank. Sums in
    shared memory send nothing.

    Returns:
        The bytes; None if a message carries the touched rows of a table only, because their number is unknown.
    """
    if any(message.rows for message in schedule.messages):
        return None
    sent = [0.0] * schedule.world_size
    for message in schedule.messages:
        for round in message.rounds:
            for transfer in round.transfers:
                _add(sent, message, round, transfer)
    return sent


def _add(sent: list[float], message: Message, round: Round, transfer: Transfer) -> None:
    """Add what each rank sends for one transfer."""
    encoded, ranks = partial(_encoded, message, round), len(sent)
    if isinstance(transfer, TreeTransfer):
        size = encoded(transfer.start, transfer.stop)
        for rank in range(ranks):
            sent[rank] += size * (transfer.reduce.parents[rank] >= 0)
            sent[rank] += size * len(transfer.broadcast.children[rank])
    elif isinstance(transfer, PairwiseReduce):
        # Pieces have at most two sizes, and what a rank sends of one depends on its size alone.
        for size, pieces in Counter(stop - start for start, stop in transfer.pieces).items():
            for rank in range(ranks):
                spans = filter(None, (turn.sends for turn in transfer.turns(rank, (0, size))))
                sent[rank] += pieces * sum(stop - start for start, stop in spans) * ITEMSIZE[message.dtype]
    elif isinstance(transfer, AllReduce):
        share = _ring(ranks, encoded(transfer.start, transfer.stop))
        for rank in range(ranks):
            sent[rank] += share
    elif isinstance(transfer, AllToAll):
        for owner, start, stop in zip(transfer.owners, transfer.bounds, transfer.bounds[1:], strict=False):
            for rank in range(ranks):
                sent[rank] += encoded(start, stop) * (ranks - 1 if rank == owner else 1)
    elif isinstance(transfer, TwoLevelAllReduce):
        size, seats = encoded(transfer.start, transfer.stop), len(transfer.places[0])
        share = _ring(seats, size) + _ring(len(transfer.places), size / seats)
        for rank in range(ranks):
            sent[rank] += share


def _ring(ranks: int, size: float) -> float:
    """Bytes that each rank sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


def _encoded(message: Message, round: Round, start: int, stop: int) -> int:
    """Bytes of elements ``[start, stop)`` of a round on the wire."""
    tail = min(stop - start, max(0, stop - (round.length - message.tail)))
    return codecs.encoded_bytes(message.compressor, stop - start, tail, ITEMSIZE[message.dtype])
