"""Ways for a message to be summed over ranks."""

from __future__ import annotations

from lightning_autosync.runtime.exchanges.base import Exchange
from lightning_autosync.runtime.exchanges.low_rank import LowRankExchange
from lightning_autosync.runtime.exchanges.native import AllReduceExchange, AllToAllExchange
from lightning_autosync.runtime.exchanges.rows import (
    NativeRowExchange,
    RowExchange,
    Rows,
    RowTreeExchange,
    add_rows,
)
from lightning_autosync.runtime.exchanges.shared import SharedMemoryExchange
from lightning_autosync.runtime.exchanges.trees import TreeExchange
from lightning_autosync.runtime.exchanges.two_level import (
    TwoLevelExchange,
    TwoLevelGroups,
    two_level_groups,
)

__all__ = [
    "AllReduceExchange",
    "AllToAllExchange",
    "Exchange",
    "LowRankExchange",
    "NativeRowExchange",
    "RowExchange",
    "RowTreeExchange",
    "Rows",
    "SharedMemoryExchange",
    "TreeExchange",
    "TwoLevelExchange",
    "TwoLevelGroups",
    "add_rows",
    "two_level_groups",
]
