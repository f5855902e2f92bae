"""CPU time of a training step under DDP and under AutoSync's native all-reduce, for many small parameters.

    python -m tests.benchmarks.step_cpu [ROUNDS]

Two ranks on one machine train `LAYERS` small linear layers, so that the work for each parameter counts. Both have the
same messages, and gradients as views of them. The contenders take turns (A B B A). The table has the milliseconds of
CPU that rank 0 takes for a step (all its threads): the median of the rounds, the smallest and the largest. CPU time
depends little on other load, so the machine need not be idle.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncStrategy

CONTENDERS = ("DDP", "AutoSync")
LAYERS, WIDTH, BATCH = 200, 32, 2
WARM_UP, STEPS = 30, 150
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
            self.seconds = (time.process_time() - self._begun) / STEPS


def train(contender: str) -> None:
    """Train on this rank; rank 0 prints the CPU seconds of a step."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    views, clock, steps = {"gradient_as_bucket_view": True}, Clock(), WARM_UP + STEPS
    ours = AutoSyncStrategy(plan="all_reduce", **views)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ours if contender == "AutoSync" else DDPStrategy(process_group_backend="gloo", **views),
        max_steps=steps,
        callbacks=[clock],
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Layers(), DataLoader(TensorDataset(torch.randn(2 * BATCH * steps, WIDTH)), batch_size=BATCH))
    if trainer.is_global_zero:
        print(f"seconds {clock.seconds}", flush=True)


def measured(contender: str) -> float:
    """Milliseconds of a job."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, "-m", NAME, "train", contender], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return 1e3 * float(next(line for line in done.stdout.splitlines() if line.startswith("seconds")).split()[1])


def main(rounds: int) -> None:
    found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for number in range(rounds):
        for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            found[contender].append(measured(contender))
    print(f"CPU ms of a step, {2 * LAYERS} parameters; load {os.getloadavg()[0]:.1f}")
    for contender, times in found.items():
        print(f"{contender:9} {statistics.median(times):6.1f}  [{min(times):.1f}, {max(times):.1f}]  {rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
