"""What the processes of a mesh must know before they can call each other, kept in a torch store.

The store is open to whoever reaches it. So what says where to call is sealed with the job's secret, which is not in it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lightning_autosync.engine.lifeline import explained, wait_watched
from lightning_autosync.engine.secret import seal, unseal
from lightning_autosync.errors import ExchangeError, PeerLost


class Entry(NamedTuple):
    """A process's place in the book: its incarnation, and where the others listen, under which of theirs at least."""

    incarnation: int
    addresses: dict[int, tuple[str, int]]
    incarnations: dict[int, int]


def sign_in(
    store: dist.Store, secret: bytes, rank: int, size: int, address: tuple[str, int], *, rejoin: bool, timeout: float
) -> Entry:
    """Write the own address into the store and read the others'.

    Every process that opens a mesh for the first time counts a round of its own; as all open their meshes in the same
    order, rounds agree. Whoever rejoins takes part in the round that its predecessor counted.

    Raises:
        ExchangeError: the store does not answer, some rank does not sign in within ``timeout`` seconds, or it did with
            another secret.
    """
    try:
        turn = store.add(f"mesh/opened/{rank}", 0 if rejoin else 1)
        book = dist.PrefixStore(f"mesh/{turn}", store)
        incarnation = book.add(f"incarnation/{rank}", 1)
        book.set(f"address/{rank}", seal(secret, _place(turn, rank), json.dumps(address)))
        others = [other for other in range(size) if other != rank]
        _await_others(book, others, timeout)
        # Before the addresses: what listens there may be newer than thought, never older.
        incarnations = {other: book.add(f"incarnation/{other}", 0) for other in others}
        addresses = {other: _address(secret, turn, other, book.get(f"address/{other}")) for other in others}
        return Entry(incarnation, addresses, incarnations)
    except ExchangeError:
        raise
    except (RuntimeError, ValueError) as cause:
        raise explained(f"rank {rank} of {size} found no peers in the store: {cause}") from None


def _await_others(book: dist.Store, others: list[int], timeout: float) -> None:
    def there(seconds: float) -> bool:
        try:
            book.wait([f"address/{other}" for other in others], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    try:
        wait_watched(there, "the mesh", timeout)
    except PeerLost:
        raise
    except ExchangeError:
        missing = [str(other) for other in others if not book.check([f"address/{other}"])]
        if not missing:
            raise
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise ExchangeError(f"{who} did not come to the mesh in {timeout:g} s") from None


def _place(turn: int, rank: int) -> str:
    return f"address of rank {rank} in mesh {turn}"


def _address(secret: bytes, turn: int, rank: int, text: bytes) -> tuple[str, int]:
    host, port = json.loads(unseal(secret, _place(turn, rank), text.decode()))
    return str(host), int(port)
