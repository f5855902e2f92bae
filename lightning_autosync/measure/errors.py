"""Errors of workers, and of the places where they run."""

from __future__ import annotations

from lightning_autosync.errors import AutoSyncError


class WorkerError(AutoSyncError, RuntimeError):
    """A worker raised, died, or did not answer.

    Attributes:
        rank: the rank where the trouble began, as far as can be told.
        traceback: the traceback text of that rank's exception; empty if it died or kept silent.
        kind: the name of that exception's class, likewise.
        reason: its message.
    """

    def __init__(self, message: str, rank: int, traceback: str = "", kind: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.kind = kind
        self.reason = reason


class InputError(WorkerError):
    """The input of a call is wrong; the message says all, without a traceback."""


class LaunchError(AutoSyncError, RuntimeError):
    """Workers cannot be started in the way asked for."""
