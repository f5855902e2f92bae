"""Collective operations that a user's code calls directly from ``torch.distributed``, where no strategy sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist


class DirectCalls:
    """Counts collective operations on this rank, without those that this package makes.

    It reads the numbers by which process groups count their operations (Gloo's and NCCL's do). These leave out ``send``
    and ``recv``.
    """

    def __init__(self) -> None:
        self._begun = _operations()

    def begin(self) -> None:
        """Count from now on."""
        self._begun = _operations()

    @property
    def number(self) -> int:
        """Number of operations since `begin`."""
        return _operations() - self._begun

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A context whose operations do not count."""
        before = _operations()
        try:
            yield
        finally:
            self._begun += _operations() - before


def _operations() -> int:
    """Number of operations of all process groups of this rank."""
    if not dist.is_initialized():
        return 0
    total = 0
    for group in dist.distributed_c10d._world.pg_map:
        with suppress(RuntimeError):  # of backends without such numbers
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in torch's stubs
    return total
