"""How processes of a mesh find each other: addresses in a torch store, then a hello over a new connection.

The store is open to whoever reaches it. So the addresses in it are sealed with the job's secret, which is not in it.
Over a connection both sides prove that they know the secret; see `engine.authentication`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_autosync.engine.authentication import connect_with_retries
from lightning_autosync.engine.secret import seal, unseal
from lightning_autosync.engine.waiting import explained, wait_for_ranks
from lightning_autosync.errors import ExchangeError, PeerLost


class PeerAddresses(NamedTuple):
    """A process's incarnation, and of each other process its address and the least incarnation that listens there."""

    incarnation: int
    addresses: dict[int, tuple[str, int]]
    incarnations: dict[int, int]


def exchange_addresses(
    store: dist.Store, secret: bytes, rank: int, size: int, address: tuple[str, int], *, rejoin: bool, timeout: float
) -> PeerAddresses:
    """Write this process's address into the store and read those of the others.

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
        return PeerAddresses(incarnation, addresses, incarnations)
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
        wait_for_ranks(there, "the mesh", timeout)
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


_RETRY = 0.05
"""Seconds after which whoever was told to wait asks again."""

JOIN, RESUME, PROBE = "join", "resume", "probe"
"""What a caller wants: a first connection, a new one in place of one that dropped, or only to know how it stands."""

WELCOME, WAIT, STALE, EXPELLED, ENDED = "welcome", "wait", "stale", "expelled", "ended"
"""Answers: connected; the other side will see to it; the caller knew an earlier incarnation; given up; it leaves."""


class Hello(NamedTuple):
    """What a caller says: who it is, under which incarnation, whom it expects (0: anyone), how many frames it has."""

    purpose: str
    rank: int
    incarnation: int
    target: int
    received: int
    host: str
    port: int


class Answer(NamedTuple):
    """What it is told, by which incarnation, which has so many of its frames and counts these peers (by rank, their
    incarnations) as live."""

    verdict: str
    incarnation: int
    received: int
    live: dict[str, int]


def encode(said: Hello | Answer) -> bytes:
    """A hello or an answer as bytes."""
    return json.dumps(list(said)).encode()


def decode_hello(text: bytes) -> Hello:
    """A hello from its bytes.

    Raises:
        ExchangeError: it is no hello.
    """
    return Hello(*_decode(text, (str, int, int, int, int, str, int)))


def decode_answer(text: bytes) -> Answer:
    """An answer from its bytes.

    Raises:
        ExchangeError: it is no answer.
    """
    answer = Answer(*_decode(text, (str, int, int, dict)))
    if not all(peer.isdecimal() and type(incarnation) is int for peer, incarnation in answer.live.items()):
        raise ExchangeError("it said what no process of a mesh says")
    return answer


def _decode(text: bytes, types: tuple[type, ...]) -> list[Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or [type(value) for value in values] != list(types):
        raise ExchangeError("it said what no process of a mesh says")
    return values


def connect_until(
    target: tuple[str, int], secret: bytes, hello: Hello, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, Answer] | None:
    """Connect to a process; try again while it hangs up or says wait. None once ``settled`` returns true.

    Raises:
        OSError: nobody listens there, or no answer came before ``deadline`` (seconds of `time.monotonic`).
    """
    while not settled():
        found = connect_with_retries(target, secret, encode(hello), deadline, settled)
        if found is None:
            return None
        connection, text = found
        try:
            answer = decode_answer(text)
        except ExchangeError as cause:
            connection.close()
            raise ConnectionError(str(cause)) from None
        if answer.verdict == ENDED:
            connection.close()
            raise ConnectionResetError("it hung up")
        if answer.verdict != WAIT or hello.purpose == PROBE:
            return connection, answer
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError("it told to wait for too long")
        time.sleep(_RETRY)
    return None


Connected = Callable[[tuple[socket.socket, Answer] | None], None]
"""Told the connection and the answer; None if the call is no longer needed."""
Failed = Callable[[OSError], None]


class Connector:
    """Opens connections with the job's secret, each on a thread of its own, until stopped."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()  # the mesh's thread calls, and whoever makes the mesh
        self._closed = threading.Event()

    def connect(
        self,
        address: tuple[str, int],
        hello: Hello,
        timeout: float,
        settled: Callable[[], bool],
        connected: Connected,
        failed: Failed,
    ) -> None:
        """Try for at most ``timeout`` seconds, or until ``settled``; the callbacks run on the attempt's own thread."""
        deadline = time.monotonic() + timeout

        def run() -> None:
            try:
                found = connect_until(
                    address, self._secret, hello, deadline, lambda: settled() or self._closed.is_set()
                )
            except OSError as cause:
                failed(cause)
            else:
                connected(found)

        thread = threading.Thread(target=run, name="autosync-dial", daemon=True)
        with self._changing:
            thread.start()
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def stop(self) -> None:
        """Let attempts end soon, as not needed any more."""
        self._closed.set()

    def join(self) -> None:
        """Wait until the last attempt has ended."""
        with self._changing:
            threads = self._threads
        for thread in threads:
            thread.join()
