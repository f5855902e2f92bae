"""What ends a search before its budget is spent."""

from __future__ import annotations

from lightning_autosync.errors import AutoSyncError


class TuningError(AutoSyncError, RuntimeError):
    """A run cannot go on; the study keeps what was found."""
