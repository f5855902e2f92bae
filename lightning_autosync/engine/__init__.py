"""Running a plan: the engine, its exchanges, and the connections under them."""

from __future__ import annotations

from lightning_autosync.engine.engine import Engine
from lightning_autosync.engine.grouped_optimizer import GroupedOptimizer

__all__ = ["Engine", "GroupedOptimizer"]
