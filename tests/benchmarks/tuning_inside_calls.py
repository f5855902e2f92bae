"""What the ranks of ``tests.benchmarks.tuning_inside`` do: they train in turns with the ranks of another job."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.strategy.lightning import AutoSyncStrategy
from lightning_autosync.training import rank

PlansOfStep = tuple[int, int, int]
"""Number of changes of links before a step, the present plan, and the plan that synchronizes the step."""


class StepsInTurns(rank.StepTimes):
    """Records the seconds, the CPU seconds of this process and the plans of each step.

    After each ``slice`` of steps, the rank waits for its next turn. The wait is for a byte in the pipe ``go.RANK``, and
    does not count as part of a step. A byte in the pipe ``waits`` tells that this rank waits. It waits also before its
    first step, and after the last one.

    Args:
        turns: directory of the pipes.
        slice: number of steps of a turn; 0 never waits.
    """

    def __init__(self, turns: str, slice: int) -> None:
        super().__init__()
        self.cpu: list[float] = []
        self.plans: list[PlansOfStep] = []
        self.begun = 0.0
        self._slice = slice
        if slice:
            # Opened for both directions, because opening for one would block until the other end is open.
            pipes = f"go.{dist.get_rank()}", "waits"
            self._go, self._waits = (os.open(os.path.join(turns, pipe), os.O_RDWR) for pipe in pipes)

    def on_train_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()
        self._wait()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.plans.append(_plans_of(trainer.strategy))
        self._used = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        self.cpu.append(time.process_time() - self._used)
        if self._slice and len(self.seconds) % self._slice == 0:
            self._wait()
            self._last = time.perf_counter()

    def _wait(self) -> None:
        if self._slice:
            os.write(self._waits, b".")
            os.read(self._go, 1)


def train(request: dict[str, Any]) -> dict[str, Any]:
    """Train once in the default process group; collective.

    Args:
        request: as for `lightning_autosync.training.rank.train_worker`, and ``turns`` and ``slice`` of `StepsInTurns`.

    Returns:
        Seconds of this rank until its first step (``start``), the median ``steps`` of all ranks and the ``cpu`` seconds
        of them together, the ``plans`` of `PlansOfStep`, and ``report``: that of `AutoSyncStrategy`, None for DDP.
    """
    settings, cluster, plan = rank._parsed(request)
    assert cluster is not None
    job = rank.RankTraining(settings, request["directory"], *rank._shape(cluster, settings), cluster, plan)
    L.seed_everything(settings.seed, workers=True, verbose=False)
    times = StepsInTurns(request["turns"], request["slice"])
    trainer = rank._trainer(job, times)
    dist.barrier()
    begin = time.perf_counter()
    trainer.fit(rank._model(job))
    steps = [rank.statistics.median(step) for step in zip(*gather_json(times.seconds), strict=True)]
    cpu = [sum(step) for step in zip(*gather_json(times.cpu), strict=True)]
    report = None
    if isinstance(trainer.strategy, AutoSyncStrategy) and (found := trainer.strategy.report()) is not None:
        report = {**found.to_dict(), "trials": [dataclasses.asdict(trial) for trial in found.trials]}
    return {"start": times.begun - begin, "steps": steps, "cpu": cpu, "plans": times.plans, "report": report}


def _plans_of(strategy: Strategy) -> PlansOfStep:
    if not isinstance(strategy, AutoSyncStrategy):
        return 0, 0, 0
    tuning = strategy._replica._tuning  # type: ignore[union-attr]
    tuner = tuning._tuner
    return (tuning._changes, 0, 0) if tuner is None else (tuning._changes, tuner._tuner.present, tuner._used)
