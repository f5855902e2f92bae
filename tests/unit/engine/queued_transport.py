"""A transport for tests of exchanges, which has all ranks in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from lightning_autosync.engine.transport import Frame, Peer

Queues = Mapping[tuple[int, int], deque[Any]]
"""What one rank has sent to another and the test has not delivered: frames, their bytes, and what to call then."""


class QueuedTransport:
    """The transport of one rank. Frames to each other rank wait in a queue, in the order of the calls.

    Args:
        interface: the interface over which all frames must leave.
    """

    error = None

    def __init__(self, rank: int, queues: Queues, interface: int = 0) -> None:
        self.rank, self._queues, self._interface = rank, queues, interface

    def register(self, channel: int, receiver: Any) -> None:
        self.receiver = receiver

    def submit(self, call: Callable[[], None]) -> None:
        call()

    def send(self, peer: Peer, frame: Frame, wire: memoryview, urgency: Any, sent: Callable[[], None] | None) -> None:
        assert peer.interface == self._interface
        self._queues[self.rank, peer.rank].append((frame, wire, sent))
