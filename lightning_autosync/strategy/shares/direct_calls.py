"""Collective operations that a user's code calls directly from ``torch.distributed``, where no strategy sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from lightning_autosync.engine.collectives import OWN_GROUP

DIRECT = "an operation of torch.distributed"
"""What messages call an operation that the user's code calls directly."""


class DirectCalls:
    """Counts collective operations on this rank, without those that this package makes; refuses them within parts.

    It reads the numbers by which process groups count their operations (Gloo's and NCCL's do). These leave out ``send``
    and ``recv``.
    """

    def __init__(self) -> None:
        self._begun = _operations()
        self._refuse: Callable[[str], NoReturn] | None = None

    def begin(self) -> None:
        """Count from now on."""
        self._begun = _operations()

    @property
    def number(self) -> int:
        """Number of operations since `begin`."""
        return _operations() - self._begun

    @contextmanager
    def within_part(self, refuse: Callable[[str], NoReturn]) -> Iterator[None]:
        """The context of a part of a batch, which must not call collective operations; it counts from its beginning.

        Args:
            refuse: raises an error that names such an operation.
        """
        self._refuse = refuse
        self.begin()
        try:
            yield
        finally:
            self._refuse = None
        if self.number:
            refuse(DIRECT)

    def note(self, what: str) -> None:
        """Refuse a collective operation that this package makes for the user, within a part."""
        if self._refuse is not None:
            self._refuse(what)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A context whose operations do not count."""
        before = _operations()
        try:
            yield
        finally:
            self._begun += _operations() - before


def _operations() -> int:
    """Number of operations of this rank's process groups, without those that only this package uses.

    Other threads use these while a plan is opened, also while the user's code runs.
    """
    if not dist.is_initialized():
        return 0
    total = 0
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc == OWN_GROUP:
            continue
        with suppress(RuntimeError):  # of backends without such numbers
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in torch's stubs
    return total
