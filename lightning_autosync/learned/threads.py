"""One thread for small networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, and as a decorator within the function, torch and DGL compute on the calling thread alone.

    These networks' steps last milliseconds: threads gain little where cores are idle, and where live workers or other
    trainings keep them busy, every operation waits for the slowest thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
