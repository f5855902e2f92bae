"""Modules that ranks run in different orders: each rank then waits for an exchange that another one has not begun."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

PATIENCE = 5.0
"""Seconds of a wait after which a rank tells for what it waits."""


class Turns:
    """The exchanges that this rank has begun, by name, and the one for which it waits.

    All ranks begin exchanges of one name equally often, but perhaps those of two names in different orders.
    """

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()
        self._wait: dict[str, Any] | None = None
        self._since = 0.0

    def begin(self, name: str) -> None:
        """Note that this rank begins an exchange."""
        self._begun[name] += 1

    def wait(self, name: str, source: int | None = None) -> None:
        """Note that this rank waits from now on for the exchange of this name that it began last.

        Args:
            name: name of the exchange.
            source: the only rank that this one waits for; None for all.
        """
        self._wait, self._since = {"name": name, "source": source}, time.monotonic()

    def overdue(self) -> dict[str, Any] | None:
        """What the other ranks should know of a long wait, once for each; None if there is nothing.

        The wait may be over. Then all ranks that it needed have begun the exchange, so it is harmless to tell.
        """
        if self._wait is None or time.monotonic() - self._since < PATIENCE:
            return None
        wait, self._wait = self._wait, None
        return {**wait, "begun": dict(self._begun)}


def crossed(waits: Mapping[int, dict[str, Any]]) -> str:
    """Why ranks would wait for ever; empty if they may go on.

    Args:
        waits: what `Turns.overdue` told last, by rank.
    """
    for (one, here), (other, there) in combinations(sorted(waits.items()), 2):
        if _needs(here, other, there) and _needs(there, one, here):
            return (
                f"ranks {one} and {other} wait for each other: rank {one} in the {here['name']}, and rank {other} in "
                f"the {there['name']}. Run the modules in the same order on all ranks"
            )
    return ""


def _needs(here: dict[str, Any], other: int, there: dict[str, Any]) -> bool:
    """Whether a rank waits for an exchange that another rank, ``other``, has to begin first."""
    name = here["name"]
    return here["source"] in (None, other) and there["begun"].get(name, 0) < here["begun"].get(name, 0)
