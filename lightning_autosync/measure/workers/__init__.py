"""Live worker processes that execute orders."""

from __future__ import annotations

from lightning_autosync.measure.errors import InputError, LaunchError, WorkerError
from lightning_autosync.measure.workers.pool import WorkerPool

__all__ = ["InputError", "LaunchError", "WorkerError", "WorkerPool"]
