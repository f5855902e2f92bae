"""Functions that the benchmark of memory calls in workers."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_PEAK = "VmHWM:"


def reset_peak() -> int:
    """Bytes that this process has in memory; its peak begins from here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    return peak()


def peak() -> int:
    """The most bytes that this process had in memory since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(_PEAK))
    return 1024 * int(line.split()[1])
