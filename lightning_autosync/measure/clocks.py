"""Clocks that tell how long the steps of a rank take, on the CPU and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Tells the seconds between moments."""

    def now(self) -> Any:
        """The present moment."""
        ...

    def durations(self, moments: Sequence[Any]) -> list[float]:
        """The seconds between each moment and the next one."""
        ...


class HostClock:
    """The clock of the host."""

    def now(self) -> float:
        return time.perf_counter()

    def durations(self, moments: Sequence[float]) -> list[float]:
        return [end - start for start, end in pairwise(moments)]


class StreamClock:
    """Events on the device's current stream, since the host runs ahead of a GPU. Steps do not wait for the clock."""

    def now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def durations(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        moments[-1].synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairwise(moments)]


def clock_of(device: torch.device) -> Clock:
    """The clock for steps on ``device``."""
    return StreamClock() if device.type == "cuda" else HostClock()
