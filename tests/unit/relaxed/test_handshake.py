"""Processes of a mesh find each other: addresses in the store, and connections made on threads of their own."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist
from strangers import SECRET

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.handshake import JOIN, Connector, Hello, exchange_addresses


def test_closing_waits_for_every_call_whoever_made_it() -> None:
    """Nobody accepts, so that a call goes on until its dialler hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        hello = Hello(JOIN, 0, 1, 0, 0, *address)
        connector, told = Connector(SECRET), []

        def call() -> None:
            for _ in range(5):
                connector.connect(address, hello, 30.0, lambda: False, told.append, told.append)

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert told == []
        connector.stop()
        connector.join()
        assert told == [None] * 20


def test_who_does_not_sign_in_is_named() -> None:
    with pytest.raises(ExchangeError, match=r"^ranks 1, 2 did not join the mesh within 0\.3 s$"):
        exchange_addresses(dist.HashStore(), b"secret", 0, 3, ("127.0.0.1", 1), rejoin=False, timeout=0.3)
