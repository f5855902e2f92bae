"""Ports for tests whose processes listen later."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from functools import cache

HOST = "127.0.0.1"
# Below the ports that Linux gives to outgoing connections, which would take a free one before the test listens on it.
_FIRST, _COUNT = 12_000, 20_000


@cache
def _numbers(process: int) -> Iterator[int]:
    """Processes, which may be forks of each other, begin far apart, since each tests for itself."""
    return itertools.count(process * 97)


def free_port() -> int:
    """A port on which nothing listens. No call of this process returns it again soon."""
    while True:
        port = _FIRST + next(_numbers(os.getpid())) % _COUNT
        try:
            with socket.create_server((HOST, port)):
                return port
        except OSError:
            continue
