"""Running a plan: the engine, its exchanges, and the connections under them."""

from __future__ import annotations

from lightning_autosync.engine.engine import Engine
from lightning_autosync.engine.step_overlap import StepOverlap, defer_steps

__all__ = ["Engine", "StepOverlap", "defer_steps"]
