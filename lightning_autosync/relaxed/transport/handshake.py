"""Meeting of the processes of a mesh: addresses in a torch store, then a hello over a new connection.

Anyone who reaches the store can write to it. Addresses in it are therefore sealed with the job's secret, which is not
in the store. Over a connection, both sides prove that they know the secret; see `engine.authentication`.
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
    """This process's incarnation, and the addresses and minimum incarnations of the other processes, by rank."""

    incarnation: int
    addresses: dict[int, tuple[str, int]]
    incarnations: dict[int, int]


def exchange_addresses(
    store: dist.Store, secret: bytes, rank: int, size: int, address: tuple[str, int], *, rejoin: bool, timeout: float
) -> PeerAddresses:
    """Write this process's address into the store and read those of the other processes.

    Every process counts the meshes that it opens. All processes open their meshes in the same order, so the counts
    agree, and keys of different meshes do not mix. A process that rejoins uses the count of its predecessor.

    Raises:
        ExchangeError: the store does not answer, a rank does not sign in within ``timeout`` seconds, or a rank signed
            in with another secret.
    """
    try:
        turn = store.add(f"mesh/opened/{rank}", 0 if rejoin else 1)
        book = dist.PrefixStore(f"mesh/{turn}", store)
        incarnation = book.add(f"incarnation/{rank}", 1)
        book.set(f"address/{rank}", seal(secret, _place(turn, rank), json.dumps(address)))
        others = [other for other in range(size) if other != rank]
        _await_others(book, others, timeout)
        # Read before the addresses, so that the process at an address may be newer than its incarnation, never older.
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
        raise ExchangeError(f"{who} did not join the mesh within {timeout:g} s") from None


def _place(turn: int, rank: int) -> str:
    return f"address of rank {rank} in mesh {turn}"


def _address(secret: bytes, turn: int, rank: int, text: bytes) -> tuple[str, int]:
    host, port = json.loads(unseal(secret, _place(turn, rank), text.decode()))
    return str(host), int(port)


_RETRY = 0.05
"""Seconds before a caller that got the answer `WAIT` tries again."""

JOIN, RESUME, PROBE = "join", "resume", "probe"
"""Purposes of a call: a first connection, a replacement of a dropped connection, or only the peer's verdict."""

WELCOME, WAIT, STALE, EXPELLED, ENDED = "welcome", "wait", "stale", "expelled", "ended"
"""Verdicts: connected; the other side will connect; the caller expected an earlier incarnation; the caller was given
up; the listener is closing."""


class Hello(NamedTuple):
    """A caller's claim.

    Attributes:
        purpose: `JOIN`, `RESUME` or `PROBE`.
        target: the listener's incarnation that the caller expects; 0 for any.
        received: number of frames that the caller has received from the listener.
        host: host at which the caller listens.
        port: port at which the caller listens.
    """

    purpose: str
    rank: int
    incarnation: int
    target: int
    received: int
    host: str
    port: int


class Answer(NamedTuple):
    """A listener's answer.

    Attributes:
        verdict: `WELCOME`, `WAIT`, `STALE`, `EXPELLED` or `ENDED`.
        incarnation: the listener's incarnation.
        received: number of frames that the listener has received from the caller.
        live: incarnations of the listener's live peers, by rank.
    """

    verdict: str
    incarnation: int
    received: int
    live: dict[str, int]


def encode(said: Hello | Answer) -> bytes:
    """A hello or an answer as bytes."""
    return json.dumps(list(said)).encode()


def decode_hello(text: bytes) -> Hello:
    """Decode a hello.

    Raises:
        ExchangeError: ``text`` is no hello.
    """
    return Hello(*_decode(text, (str, int, int, int, int, str, int)))


def decode_answer(text: bytes) -> Answer:
    """Decode an answer.

    Raises:
        ExchangeError: ``text`` is no answer.
    """
    answer = Answer(*_decode(text, (str, int, int, dict)))
    if not all(peer.isdecimal() and type(incarnation) is int for peer, incarnation in answer.live.items()):
        raise ExchangeError("its answer is not one that a process of a mesh sends")
    return answer


def _decode(text: bytes, types: tuple[type, ...]) -> list[Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or [type(value) for value in values] != list(types):
        raise ExchangeError("its message is not one that a process of a mesh sends")
    return values


def connect_until(
    target: tuple[str, int], secret: bytes, hello: Hello, deadline: float, settled: Callable[[], bool]
) -> tuple[socket.socket, Answer] | None:
    """Connect to a process; try again while it hangs up or answers `WAIT`. None once ``settled`` returns True.

    Raises:
        OSError: nothing listens there, or no answer came before ``deadline`` (a time of `time.monotonic`).
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
            raise TimeoutError("it did not become ready before the timeout")
        time.sleep(_RETRY)
    return None


Connected = Callable[[tuple[socket.socket, Answer] | None], None]
"""Called with the connection and the answer, or with None if the connection is no longer needed."""
Failed = Callable[[OSError], None]


class Connector:
    """Opens connections with the job's secret, each on a thread of its own, until stopped."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()  # for the mesh's thread and the thread that opens the mesh
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
        """Cancel all attempts, which then end soon."""
        self._closed.set()

    def join(self) -> None:
        """Wait until all attempts have ended."""
        with self._changing:
            threads = self._threads
        for thread in threads:
            thread.join()
