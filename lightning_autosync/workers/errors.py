"""What can go wrong with worker processes."""

from __future__ import annotations

from lightning_autosync.errors import AutoSyncError


class WorkerError(AutoSyncError, RuntimeError):
    """A worker raised, died, or did not answer.

    Attributes:
        rank: the rank where the trouble began, as far as can be told.
        traceback: the traceback text of that rank's exception; empty if it died or kept silent.
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class LaunchError(AutoSyncError, RuntimeError):
    """Workers cannot be started in the way asked for."""
