"""Step times without a cluster: the replay of schedules."""

from __future__ import annotations

from lightning_autosync.simulator.bound import step_bound
from lightning_autosync.simulator.constants import CodecRates, Constants
from lightning_autosync.simulator.prediction import MessageSpan, Prediction, Span, Timeline
from lightning_autosync.simulator.replay import Replay, replay

__all__ = [
    "CodecRates",
    "Constants",
    "MessageSpan",
    "Prediction",
    "Replay",
    "Span",
    "Timeline",
    "replay",
    "step_bound",
]
