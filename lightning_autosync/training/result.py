"""``autosync-training/1``: the result document of a training."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_autosync.documents import Count, Duration, Index, Metric, Result
from lightning_autosync.training.settings import TrainingSettings


class TrainingResult(Result):
    """One training.

    Attributes:
        emulated: whether ``links`` were emulated and ``compute`` was paced.
        cluster, plan: documents; None if there is none.
        strategy: ``autosync`` or ``ddp``.
        metrics: last values of the metrics that the model logged.
        epochs, steps: numbers of epochs and of optimizer steps.
        seconds: seconds of the whole training.
        median_step_seconds: see `lightning_autosync.training.rank.median_step`.
        step_seconds_by_rank: [ranks][steps] seconds of each step.
        checkpoint: path of the best checkpoint; None if there is none.
    """

    FORMAT: ClassVar[str] = "autosync-training/1"

    settings: TrainingSettings
    emulated: dict[str, bool]
    cluster: dict[str, Any] | None
    world_size: Count
    strategy: str
    plan: dict[str, Any] | None
    metrics: dict[str, Metric]
    epochs: Index
    steps: Index
    seconds: Duration
    median_step_seconds: Duration | None
    step_seconds_by_rank: tuple[tuple[Duration, ...], ...]
    checkpoint: str | None
