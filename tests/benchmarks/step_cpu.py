"""CPU time of a training step under DDP and under AutoSync's native all-reduce, for many small parameters.

    python -m tests.benchmarks.step_cpu [ROUNDS] [RANKS] [CONTENDER ...]

Ranks on one machine train `LAYERS` small linear layers, so that the work for each parameter counts. All have DDP's
messages, and gradients as views of them. The contenders take turns (A B B A) in the same processes. Besides ``DDP``
they are AutoSync with this plan given (``AutoSync``), and jobs whose ranks count as hosts of their own, while they tune
themselves (``trying``) and after that (``settled``). The table has the milliseconds of CPU that a rank takes for a step
(all its threads, mean of the ranks): the median of the rounds, the smallest and the largest, and the median of the
rounds' CPU time divided by DDP's. CPU time depends little on other load, so the machine need not be idle.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncStrategy, ClusterSpec, TuningSettings
from lightning_autosync.strategy.tuning import proposals

CONTENDERS = ("DDP", "AutoSync", "trying", "settled")
LAYERS, WIDTH, BATCH = 200, 32, 2
WARM_UP, STEPS = 10, 50
NAME = "tests.benchmarks.step_cpu"


class Layers(LightningModule):
    """A chain of small linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Clock(Callback):
    """CPU seconds of a step, after the first ones."""

    def __init__(self) -> None:
        self.seconds, self._begun = 0.0, 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP - 1:
            self._begun = time.process_time()
        elif batch_idx == WARM_UP + STEPS - 1:
            used = torch.tensor((time.process_time() - self._begun) / STEPS)
            dist.all_reduce(used)
            self.seconds = float(used) / dist.get_world_size()


def strategy_of(contender: str, ranks: int) -> Strategy:
    views: dict[str, Any] = {"gradient_as_bucket_view": True}
    if contender == "DDP":
        return DDPStrategy(process_group_backend="gloo", **views)
    if contender == "AutoSync":
        return AutoSyncStrategy(plan="all_reduce", **views)
    warm_up = 10**6 if contender == "trying" else 1
    tuning = TuningSettings(plans=int(contender == "trying"), search=0.1, warm_up=warm_up, cache=None)
    return AutoSyncStrategy(cluster=ClusterSpec.uniform(ranks, bandwidth="1 Gbit/s"), tuning=tuning, **views)


def measured(contender: str) -> float:
    """Milliseconds of a job of this process's group; collective."""
    ranks, clock, steps = int(os.environ["WORLD_SIZE"]), Clock(), WARM_UP + STEPS
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy_of(contender, ranks),
        max_steps=steps,
        callbacks=[clock],
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = TensorDataset(torch.randn(ranks * BATCH * steps, WIDTH))
    # All links are this machine's, and are not like the description. All jobs are to have DDP's plan.
    with (
        mock.patch.object(proposals, "compare_with_job", return_value=[]),
        mock.patch.object(proposals, "LEAST_GAIN", math.inf),
    ):
        trainer.fit(Layers(), DataLoader(samples, batch_size=BATCH))
    return 1e3 * clock.seconds


def measure(rounds: int, contenders: Sequence[str]) -> None:
    """Let contenders take turns in this rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    found: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(rounds):
        for contender in found if number % 2 == 0 else reversed(found):
            found[contender].append(measured(contender))
    if os.environ["RANK"] != "0":
        return
    ranks, load = os.environ["WORLD_SIZE"], os.getloadavg()[0]
    print(f"CPU ms of a step, {ranks} ranks, {2 * LAYERS} parameters, {rounds} rounds; load {load:.1f}")
    for contender, times in found.items():
        ratio = statistics.median(one / other for one, other in zip(times, found["DDP"], strict=True))
        figures = f"{statistics.median(times):6.1f}  [{min(times):.1f}, {max(times):.1f}]"
        print(f"{contender:9} {figures}  {ratio:.3f} of DDP's CPU time", flush=True)


def main(rounds: str = "6", ranks: str = "2", *contenders: str) -> int:
    """Start the ranks; returns their exit status."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return subprocess.run([*launch, "-m", NAME, rounds, *(contenders or CONTENDERS)], check=False).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(int(sys.argv[1]), sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
