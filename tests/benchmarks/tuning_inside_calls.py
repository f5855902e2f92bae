"""What the ranks of ``tests.benchmarks.tuning_inside`` do: one job after the other, in the same processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.strategy.lightning import AutoSyncStrategy
from lightning_autosync.training import rank

PlansOfStep = tuple[int, int, int]
"""Number of changes of links before a step, the present plan, and the plan that synchronizes the step."""


class TimesOfPlans(rank.StepTimes):
    """Records the seconds of each step, and the plans of `PlansOfStep`."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[PlansOfStep] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.plans.append(_plans_of(trainer.strategy))


def train(request: dict[str, Any]) -> dict[str, Any]:
    """Train once in the default process group; collective.

    Args:
        request: as for `lightning_autosync.training.rank.train_worker`.

    Returns:
        ``seconds`` of the whole training on this rank, the median ``steps`` of all ranks, the ``plans`` of
        `PlansOfStep`, and ``report``: that of `AutoSyncStrategy`, None for DDP.
    """
    settings, cluster, plan = rank._parsed(request)
    assert cluster is not None
    job = rank.RankTraining(settings, request["directory"], *rank._shape(cluster, settings), cluster, plan)
    L.seed_everything(settings.seed, workers=True, verbose=False)
    times = TimesOfPlans()
    trainer = rank._trainer(job, times)
    dist.barrier()
    begin = rank.time.perf_counter()
    trainer.fit(rank._model(job))
    seconds = rank.time.perf_counter() - begin
    steps = [rank.statistics.median(step) for step in zip(*gather_json(times.seconds), strict=True)]
    report = None
    if isinstance(trainer.strategy, AutoSyncStrategy) and (found := trainer.strategy.report()) is not None:
        report = {**found.to_dict(), "trials": [dataclasses.asdict(trial) for trial in found.trials]}
    return {"seconds": seconds, "steps": steps, "plans": times.plans, "report": report}


def _plans_of(strategy: Strategy) -> PlansOfStep:
    if not isinstance(strategy, AutoSyncStrategy):
        return 0, 0, 0
    tuning = strategy._replica._tuning  # type: ignore[union-attr]
    tuner = tuning._tuner
    return (tuning._changes, 0, 0) if tuner is None else (tuning._changes, tuner._tuner.present, tuner._used)
