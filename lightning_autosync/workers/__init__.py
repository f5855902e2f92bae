"""Live worker processes that take orders, on this machine or behind emulated links."""

from __future__ import annotations

from lightning_autosync.workers.emulation import EmulatedLaunch
from lightning_autosync.workers.errors import InputError, LaunchError, WorkerError
from lightning_autosync.workers.launch import Launch, LocalLaunch
from lightning_autosync.workers.pool import WorkerPool

__all__ = ["EmulatedLaunch", "InputError", "Launch", "LaunchError", "LocalLaunch", "WorkerError", "WorkerPool"]
