"""Named ranges, which profilers show beside the operators: PyTorch's profiler and NVIDIA's Nsight Systems."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_UNDER_NSIGHT = torch.version.cuda is not None and any(
    os.environ.get(name) for name in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
)
"""Whether a tool that shows NVTX ranges started this process: Nsight sets these variables."""
_NOTHING = nullcontext()


def profiled(message: str, what: str) -> AbstractContextManager[Any]:
    """The context of work for a message, which profilers show as ``autosync/<message>/<what>``.

    PyTorch's profiler shows it on the thread that does the work, and so do Nsight Systems (as NVTX range, where torch
    has CUDA) and ``torch.autograd.profiler.emit_nvtx``. With no profiler active, this costs a fraction of a
    microsecond.
    """
    if profiler._is_profiler_enabled:  # torch's own flag for quick checks; under emit_nvtx it is set too
        return profiler.record_function(f"autosync/{message}/{what}")
    return _nvtx(f"autosync/{message}/{what}") if _UNDER_NSIGHT else _NOTHING


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
