"""Marks in time on the host or in a device's stream, so that queued work is timed where it runs."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks while work is under way; reads them once the work is over."""

    def mark(self) -> Any:
        """The present point of the work, without waiting for it."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another."""

    def synchronize(self) -> None:
        """Wait for all work; marks may be read afterwards."""


class HostClock:
    """For work that is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        return None


class DeviceClock:
    """For work queued on a device: marks are timing events in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self._backend.Event(enable_timing=True)
        event.record(self._backend.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    def synchronize(self) -> None:
        self._backend.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock for work on ``device``."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
