"""How long work reports how far it is, to whatever shows it."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[int, int, str], None]
"""Called with the number of finished pieces of work, the number of all, and a few words on the last one."""


def silent(done: int, total: int, text: str) -> None:
    """A `Report` that shows nothing."""
