"""A live peer as the mesh's thread sees it: its link, the connection under it, and when it was last heard."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from lightning_autosync.relaxed.heartbeat import SilenceLimit
from lightning_autosync.relaxed.link import Link

FORGIVEN = 5
"""Absences of this process in a row that excuse a peer's silence: a live one is heard as soon as it is listened to."""


@dataclass(eq=False)
class Line:
    """A link, and the connection that carries it at the moment."""

    link: Link
    limit: SilenceLimit
    address: tuple[str, int]
    socket: socket.socket | None = None
    heard: float = 0.0
    unproven: bool = True
    """Nothing was heard on the present connection."""
    deadline: float = math.inf
    """When to give up: a broken line that is not replaced, or a peer that left and does not close."""
    watching_writes: bool = False
    disputed: bool = False
    """The peer is of lower rank and cannot be reached; the others are asked whether they can."""
    silent_from: float | None = None
    """When the last sign of life came before a silence for which the connection is being replaced."""
    _absences: int = 0

    def hear(self, now: float) -> None:
        """A sign of life."""
        self.heard, self.unproven, self.silent_from, self._absences = now, False, None, 0
        if not self.link.peer_left:
            self.deadline = math.inf

    def forgive(self, absence: float) -> None:
        """This process was away itself for so many seconds, and must not blame the peer for the silence."""
        self._absences += 1
        if self._absences <= FORGIVEN:
            self.heard += absence
            self.deadline += absence
            self.limit.pause()

    def too_silent(self, now: float) -> bool:
        return now - self.heard > self.limit.seconds and not self.link.peer_left
