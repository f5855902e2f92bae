"""Ways for a message to be summed over ranks."""

from __future__ import annotations

from lightning_autosync.engine.exchanges.base import Exchange
from lightning_autosync.engine.exchanges.low_rank import LowRankExchange
from lightning_autosync.engine.exchanges.native import AllReduceExchange, AllToAllExchange
from lightning_autosync.engine.exchanges.rows import (
    NativeRowExchange,
    RowExchange,
    Rows,
    RowTreeExchange,
    add_rows,
)
from lightning_autosync.engine.exchanges.shared import SharedMemoryExchange
from lightning_autosync.engine.exchanges.trees import TreeExchange
from lightning_autosync.engine.exchanges.two_level import (
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
