"""Predicts step times without a cluster: the replay of schedules."""

from __future__ import annotations

from lightning_autosync.replay.bound import Bound, least_step, step_bound, synchronization_bound
from lightning_autosync.replay.constants import CodecRates, Constants
from lightning_autosync.replay.overlap import overlapped_step
from lightning_autosync.replay.prediction import MessageSpan, Prediction, Span, Timeline
from lightning_autosync.replay.replay import Replay, replay
from lightning_autosync.replay.warm_up import warm_up

__all__ = [
    "Bound",
    "CodecRates",
    "Constants",
    "MessageSpan",
    "Prediction",
    "Replay",
    "Span",
    "Timeline",
    "least_step",
    "overlapped_step",
    "replay",
    "step_bound",
    "synchronization_bound",
    "warm_up",
]
