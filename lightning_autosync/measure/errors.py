"""Errors of workers and of launches."""

from __future__ import annotations

from lightning_autosync.errors import AutoSyncError


class WorkerError(AutoSyncError, RuntimeError):
    """A worker raised, died, or did not answer.

    Attributes:
        rank: rank that failed first, as far as known.
        traceback: traceback text of that rank's exception; empty if it died or did not answer.
        kind: class name of that exception; empty likewise.
        reason: message of that exception; empty likewise.
    """

    def __init__(self, message: str, rank: int, traceback: str = "", kind: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.kind = kind
        self.reason = reason


class InputError(WorkerError):
    """The input of a call is wrong; the message explains it without a traceback."""


class LaunchError(AutoSyncError, RuntimeError):
    """Workers cannot be started in the requested way."""
