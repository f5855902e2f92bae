"""Predicts step times without a cluster: the replay of schedules.

`Replay` and `warm_up` are imported on first use: they need numba, which takes long to import, and training works
without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_autosync.replay.bound import Bound, least_step, step_bound, synchronization_bound
from lightning_autosync.replay.constants import CodecRates, Constants, DecodeRates
from lightning_autosync.replay.overlap import (
    least_overlapped_step,
    overlapped_step,
    overlapped_step_time,
    overlapped_timeline,
)
from lightning_autosync.replay.prediction import MessageSpan, Prediction, Span, Timeline

if TYPE_CHECKING:
    from lightning_autosync.replay.replay import Replay, warm_up

__all__ = [
    "Bound",
    "CodecRates",
    "Constants",
    "DecodeRates",
    "MessageSpan",
    "Prediction",
    "Replay",
    "Span",
    "Timeline",
    "least_overlapped_step",
    "least_step",
    "overlapped_step",
    "overlapped_step_time",
    "overlapped_timeline",
    "step_bound",
    "synchronization_bound",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in ("Replay", "warm_up"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from lightning_autosync.replay import replay

    return getattr(replay, name)
