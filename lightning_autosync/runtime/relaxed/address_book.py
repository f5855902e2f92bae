"""What the processes of a mesh must know before they can call each other, kept in a torch store."""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lightning_autosync.errors import ExchangeError


class Entry(NamedTuple):
    """A process's place in the book: its incarnation, the job's secret, and where the others listen, under which
    incarnations at least."""

    incarnation: int
    secret: str
    addresses: dict[int, tuple[str, int]]
    incarnations: dict[int, int]


def sign_in(
    store: dist.Store, rank: int, size: int, address: tuple[str, int], *, rejoin: bool, timeout: float
) -> Entry:
    """Write the own address into the store and read the others'.

    Every process that opens a mesh for the first time counts a round of its own; as all open their meshes in the same
    order, rounds agree. Whoever rejoins takes part in the round that its predecessor counted.

    Raises:
        ExchangeError: the store does not answer, or some rank does not sign in within ``timeout`` seconds.
    """
    limit = timedelta(seconds=timeout)
    try:
        turn = store.add(f"mesh/opened/{rank}", 0 if rejoin else 1)
        book = dist.PrefixStore(f"mesh/{turn}", store)
        incarnation = book.add(f"incarnation/{rank}", 1)
        if rank == 0 and not rejoin:
            book.set("secret", secrets.token_hex(16))
        book.set(f"address/{rank}", json.dumps(address))
        others = [other for other in range(size) if other != rank]
        book.wait(["secret", *(f"address/{other}" for other in others)], limit)
        # Before the addresses: what listens there may be newer than thought, never older.
        incarnations = {other: book.add(f"incarnation/{other}", 0) for other in others}
        addresses = {other: _address(book.get(f"address/{other}")) for other in others}
        return Entry(incarnation, book.get("secret").decode(), addresses, incarnations)
    except (dist.DistError, RuntimeError) as cause:
        raise ExchangeError(f"rank {rank} of {size} found no peers in the store: {cause}") from None


def _address(text: bytes) -> tuple[str, int]:
    host, port = json.loads(text)
    return str(host), int(port)
