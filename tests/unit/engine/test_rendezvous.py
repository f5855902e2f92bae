"""Stores: where they listen, and what else may be there."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
from ports import free_port
from strangers import listening, listening_as

from lightning_autosync.engine import rendezvous as stores
from lightning_autosync.engine.rendezvous import ask_store, find_store, open_store
from lightning_autosync.errors import ExchangeError

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT", 1.0)


def test_a_store_listens_at_its_address_only() -> None:
    store = open_store("localhost", 0, 20.0)
    assert {host for host, port in listening([os.getpid()]) if port == store.port} <= {HOST, "::1"}
    find_store("localhost", store.port, 20.0).set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_of_this_process_is_opened_again() -> None:
    first = open_store(HOST, 0, 20.0)
    first.set("key", "value")
    again = open_store(HOST, first.port, 20.0)
    assert again.get("key") == b"value"
    port = first.port
    del first
    assert again.get("key") == b"value"
    del again
    # Nobody holds it any more.
    assert not open_store(HOST, port, 20.0).check(["key"])


def test_a_port_that_another_has_is_an_error() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ExchangeError, match=f"127.0.0.1: port {port} is taken"):
            open_store(HOST, port, 20.0)
        assert all(host == HOST for host, at in listening([os.getpid()]) if at == port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ExchangeError, match=r"192\.0\.2\.1: "):
        open_store("192.0.2.1", 0, 20.0)


def first_listens(host: str) -> set[str]:
    """The addresses on which the store that rank 0 opens for a process group listens."""
    port = free_port()
    opened = stores._SignIn(stores.Rendezvous(host, port, 0, 2, 20.0))
    assert opened._holds_store
    return {address for address, at in listening([os.getpid()]) if at == port}


@pytest.mark.parametrize("host", [HOST, "localhost", "192.0.2.1"], ids=["address", "name", "gateway"])
def test_the_store_of_rank_0_listens_on_one_address_of_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A gateway, or a service as of Kubernetes, forwards to the address of the route to it."""
    monkeypatch.setattr(stores, "own_address", lambda: HOST)
    (listens,) = first_listens(host)
    assert listens in {HOST, "::1"}


def test_other_machines_find_the_store_where_only_this_one_takes_its_name_for_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "_numeric_addresses", lambda host: ["127.0.1.1"])
    assert first_listens(socket.gethostname()) <= {"::", "0.0.0.0"}


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(100)], ids=["silence", "HTTP", "zeros"]
)
def test_what_is_no_store_is_told_within_seconds(says: bytes) -> None:
    told = "no store at .*: another program listens there"
    with listening_as(lambda caller: caller.sendall(says)) as address, pytest.raises(ExchangeError, match=told):
        find_store(*address, 600.0)


def test_where_nothing_listens_there_is_no_store() -> None:
    port = free_port()
    with pytest.raises(ConnectionError, match=f"no store at 127.0.0.1:{port}"):
        find_store(HOST, port, 20.0)


def test_a_store_that_does_not_answer_is_an_error_and_no_hang() -> None:
    never = threading.Event()
    with pytest.raises(ExchangeError, match=r"no answer from the store in 1\.5 s"):
        ask_store(never.wait, 0.5)
    never.set()


def test_what_a_store_answers_is_passed_on() -> None:
    assert ask_store(lambda: "an answer") == "an answer"
    with pytest.raises(RuntimeError, match="an error of the store"):
        ask_store(lambda: _fail("an error of the store"))


def test_a_signal_interrupts_the_wait_for_a_store() -> None:
    """As Ctrl-C does."""
    never, begun = threading.Event(), time.monotonic()

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_store(never.wait, 60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        never.set()
    assert time.monotonic() - begun < 30.0


def _fail(why: str) -> None:
    raise RuntimeError(why)
