"""Who may connect: handshakes, the acceptor, pairs of ranks among strangers."""

from __future__ import annotations

import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from strangers import KINDS, SECRET, claim, listening_as, visit

from lightning_autosync.engine import authentication, connections, waiting
from lightning_autosync.engine import secret as secret_module
from lightning_autosync.engine.authentication import Acceptor, Caller
from lightning_autosync.errors import ExchangeError, PeerLost

HOST = "127.0.0.1"


def never() -> bool:
    return False


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def served(secret: bytes = SECRET, timeout: float = 20.0) -> Iterator[tuple[tuple[str, int], list[bytes], Acceptor]]:
    """An acceptor that answers everybody "welcome": where, what callers claimed, itself."""
    listener, selector = connections.listen(HOST), selectors.DefaultSelector()
    address, claims, over = listener.getsockname(), [], threading.Event()

    def admit(caller: Caller) -> None:
        claims.append(caller.claim)
        caller.answer(b"welcome")
        caller.connection.close()

    acceptor = Acceptor(listener, selector, secret, timeout, admit)

    def serve() -> None:
        while not over.is_set():
            for key, _ in selector.select(0.05):
                key.data()
            acceptor.tick(time.monotonic())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address, claims, acceptor
    finally:
        over.set()
        thread.join()
        acceptor.close()
        selector.close()


def test_who_knows_the_secret_is_let_in_and_hears_it_of_the_other() -> None:
    with served() as (address, claims, _):
        found = authentication.connect(address, SECRET, b"it is me", soon(), never)
        assert found is not None
        assert found[1] == b"welcome"
        found[0].close()
    assert claims == [b"it is me"]


def test_a_caller_of_another_secret_is_hung_up_on() -> None:
    with served() as (address, claims, _):
        with pytest.raises(authentication.ConnectionClosed):
            authentication.connect(address, b"another secret of that length", b"it is me", soon(), never)
        for kind in KINDS:
            assert visit(address, kind)
    assert claims == []


def test_what_was_overheard_is_of_no_use_later() -> None:
    with served() as (address, claims, _):
        with socket.create_connection(address) as honest:
            said = claim(honest.recv(authentication.OPENING), SECRET, b"once")
            honest.sendall(said)
            assert honest.recv(1000).endswith(b"welcome")
        with socket.create_connection(address) as stranger:
            stranger.recv(authentication.OPENING)
            stranger.sendall(said)
            assert stranger.recv(1000) == b""
    assert claims == [b"once"]


def test_a_secret_does_not_travel() -> None:
    heard: list[bytes] = []

    def listen(caller: socket.socket) -> None:
        caller.sendall(authentication.BANNER + bytes(16))
        heard.append(caller.recv(4096))

    with listening_as(listen) as address, pytest.raises(TimeoutError):
        authentication.connect(address, SECRET, b"it is me", soon(0.5), never)
    assert SECRET not in heard[0]
    assert SECRET.hex().encode() not in heard[0]


@pytest.mark.parametrize(
    ("behave", "error"),
    [
        (lambda caller: None, "no answer"),
        (lambda caller: caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>"), "is not part of an AutoSync job"),
        (
            lambda caller: caller.sendall(authentication.BANNER + bytes(16) + b"\xff" * 100),
            "is not one that a process of a job sends",
        ),
        (lambda caller: caller.sendall(authentication.BANNER + bytes(16) + b"\0" * 36), "does not know the secret"),
    ],
)
def test_a_listener_that_is_something_else_is_told(behave: Callable[[socket.socket], Any], error: str) -> None:
    with listening_as(behave) as address, pytest.raises(OSError, match=error):
        authentication.connect_with_retries(address, SECRET, b"it is me", soon(1.0), never)


def test_few_strangers_are_held_and_an_honest_caller_gets_in_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MAX_PENDING", 8)
    with served() as (address, claims, acceptor), ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(address))
        found = authentication.connect_with_retries(address, SECRET, b"it is me", soon(), never)
        assert found is not None
        found[0].close()
        assert claims == [b"it is me"]
        assert len(acceptor._pending) <= 8


def test_who_is_hung_up_on_calls_again() -> None:
    """As one whose place strangers took."""
    with served() as (address, claims, acceptor):
        read = acceptor._read

        def crowded(connection: socket.socket) -> None:
            acceptor._read = read  # type: ignore[method-assign]
            acceptor._refuse(connection)

        acceptor._read = crowded  # type: ignore[method-assign]
        found = authentication.connect_with_retries(address, SECRET, b"it is me", soon(), never)
        assert found is not None
        found[0].close()
    assert claims == [b"it is me"]


def test_who_is_hung_up_on_before_it_speaks_calls_again() -> None:
    """On a socket of the machine, unlike TCP, a caller learns at once that nobody listens any more."""
    name, heard = "\0autosync-test-" + secrets.token_hex(8), threading.Event()

    def cancelled() -> bool:
        return heard.is_set()

    with connections.listen(name) as listener:

        def hang_up() -> None:
            for _ in range(2):
                caller, _ = listener.accept()
                caller.sendall(authentication.BANNER + bytes(16))
                caller.close()
            heard.set()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert authentication.connect_with_retries([name], SECRET, b"it is me", soon(), cancelled) is None
        thread.join()


def test_slow_strangers_do_not_keep_ranks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be borne for seconds; there are more than fit into the time that all ranks have."""
    ranks, edges = 3, [(0, 1), (0, 2), (1, 2)]
    at_hand = threading.local()
    offers: list[Any] = [None] * ranks
    all_offered, besieged = threading.Barrier(ranks + 1, timeout=20.0), threading.Event()

    def gather(value: Any, group: Any) -> list[Any]:
        offers[at_hand.rank] = value
        all_offered.wait()
        besieged.wait(20.0)
        return offers

    monkeypatch.setattr(connections, "common_secret", lambda group: SECRET)
    monkeypatch.setattr(connections, "gather_json", gather)
    monkeypatch.setattr(connections.dist, "get_rank", lambda group: at_hand.rank)
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        at_hand.rank = rank
        try:
            found[rank] = connections.connect_pairs(edges, None, HOST, 20.0)
        except ExchangeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    all_offered.wait()
    with ExitStack() as held:
        for number in range(300):
            stranger = held.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(tuple(offers[1 + number % 2][0]))
        besieged.set()
        for thread in threads:
            thread.join(60.0)
    assert {rank: sorted(sockets) for rank, sockets in found.items()} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    for low, high in edges:
        found[low][high].sendall(b"%d to %d" % (low, high))
        assert found[high][low].recv(100) == b"%d to %d" % (low, high)
    for sockets in found.values():
        for connection in sockets.values():
            connection.close()


def test_ranks_that_were_given_a_secret_connect_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    offers: queue.Queue[Any] = queue.Queue()

    def gather(value: Any, group: Any) -> list[Any]:
        offers.put(value)
        return [[[HOST, 9], ""], value]

    monkeypatch.setenv("AUTOSYNC_SECRET", SECRET.decode())
    monkeypatch.setattr(secret_module, "gather_json", lambda own, group: [[*own[:2], "drawn by rank 0"], own])
    monkeypatch.setattr(connections, "gather_json", gather)
    monkeypatch.setattr(connections.dist, "get_rank", lambda group: 1)
    with ThreadPoolExecutor() as threads:
        found = threads.submit(connections.connect_pairs, [(0, 1)], None, HOST, 20.0)
        call = authentication.connect_with_retries(offers.get(timeout=20.0)[0], SECRET, b"0", soon(), never)
        assert call is not None
        call[0].close()
        found.result()[0].close()


class _Lost(waiting.Monitor):
    """Knows that rank 0 is lost."""

    timeout = 600.0

    def check(self) -> None:
        raise PeerLost(0, "its process has ended")

    def explain(self, cause: str, late: bool = False) -> ExchangeError:
        raise AssertionError(cause)


def test_a_rank_that_is_lost_while_ranks_connect_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "common_secret", lambda group: SECRET)
    monkeypatch.setattr(connections, "gather_json", lambda own, group: [[[HOST, 9], ""], own])
    monkeypatch.setattr(connections.dist, "get_rank", lambda group: 1)
    begin = time.monotonic()
    with waiting.monitored_by(_Lost()), pytest.raises(PeerLost, match="rank 0 is lost"):
        connections.connect_pairs([(0, 1)], None, HOST, 30.0)
    assert time.monotonic() - begin < 10.0


def test_a_burst_of_callers_fits_into_the_queue() -> None:
    """More than there are ranks, before anybody looks; who does not fit would have to come again a second later."""
    with connections.listen(HOST) as listener, ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(listener.getsockname(), timeout=0.9))
