"""Live worker processes that take orders, on this machine or behind emulated links."""

from __future__ import annotations

from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.launches.local import Launch, LocalLaunch
from lightning_autosync.measure.workers.errors import InputError, LaunchError, WorkerError
from lightning_autosync.measure.workers.pool import WorkerPool

__all__ = ["EmulatedLaunch", "InputError", "Launch", "LaunchError", "LocalLaunch", "WorkerError", "WorkerPool"]
