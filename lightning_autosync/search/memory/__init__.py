"""The memory of jobs that tune themselves: plans that were found earlier, with the evidence for them."""

from __future__ import annotations

from lightning_autosync.search.memory.cache import Remembered, TuningCache
from lightning_autosync.search.memory.entry import Evidence, StepTime, TunedPlan, TuningKey

__all__ = ["Evidence", "Remembered", "StepTime", "TunedPlan", "TuningCache", "TuningKey"]
