"""A Ctrl-C waits for what must not be done by halves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_autosync.measure.workers.signals import signals_as_exceptions


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within the block a Ctrl-C is held back; it is raised at its end.

    For whatever reads or writes a study: a storage that was left in the midst of that, its lock half released or what
    it knows half brought up to date, is of no use to those who end the run in order. Blocks may be nested.
    """
    with signals_as_exceptions() as endings, endings.held():
        yield
