"""How long jobs on one machine take to start: from the interpreter to the end of the first step.

    python -m tests.benchmarks.start_up [ROUNDS] [RANKS ...]

Each job is ``Trainer(accelerator="cpu", devices=RANKS, strategy=...)`` in new processes, as users start it. The
strategies take turns (A B C, C B A): ``ddp``, AutoSync with ``tuning="off"`` (``off``), and AutoSync as it comes
(``autosync``). The table has seconds of the clock, and CPU seconds of all ranks together: the median of the rounds, the
smallest and the largest; and the median of the rounds' differences from ``ddp`` and from ``off``. CPU time depends
little on other load.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncStrategy

STRATEGIES = ("ddp", "off", "autosync")
LAYERS, WIDTH = 20, 256
NAME, FOUND = "tests.benchmarks.start_up", "found: "
Times = tuple[float, float]
"""Seconds of the clock, and CPU seconds of all ranks."""


class Layers(LightningModule):
    """1.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class FirstStep(Callback):
    """Prints on rank 0 when the first step is over, and the CPU seconds of all ranks up to then."""

    def on_train_batch_end(self, *_: Any) -> None:
        now, used = time.time(), torch.tensor(time.process_time(), dtype=torch.float64)
        dist.all_reduce(used)
        if dist.get_rank() == 0:
            print(f"{FOUND}{json.dumps([now, float(used)])}", flush=True)


def strategy_of(name: str) -> str | Strategy:
    return AutoSyncStrategy(tuning="off") if name == "off" else name


def train(name: str, ranks: int) -> None:
    """Train one step; the first rank starts the others."""
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy_of(name),
        max_steps=1,
        callbacks=[FirstStep()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Layers(), DataLoader(TensorDataset(torch.randn(8 * ranks, WIDTH)), batch_size=8))


def started(name: str, ranks: int) -> Times:
    """What a job takes up to the end of its first step."""
    begin = time.time()
    command = [sys.executable, "-m", NAME, "job", name, str(ranks)]
    job = subprocess.run(command, check=True, text=True, capture_output=True)
    line = next(line for line in job.stdout.splitlines() if line.startswith(FOUND))
    end, used = json.loads(line.removeprefix(FOUND))
    return end - begin, used


def tell(name: str, times: Sequence[Times], others: dict[str, list[Times]]) -> None:
    """Print a row of the table."""
    for kind, unit in enumerate(("s", "CPU s")):
        own = [each[kind] for each in times]
        row = f"{name:9} {statistics.median(own):6.2f} {unit:5} [{min(own):.2f}, {max(own):.2f}]"
        for other, theirs in others.items():
            differences = [one - each[kind] for one, each in zip(own, theirs, strict=True)]
            row += (
                f"  {statistics.median(differences):+.2f} [{min(differences):+.2f}, {max(differences):+.2f}] to {other}"
            )
        print(row, flush=True)


def main(rounds: str = "5", *ranks: str) -> None:
    for name in STRATEGIES:
        started(name, 2)  # so that files have been read before
    for size in map(int, ranks or ("2", "4")):
        found: dict[str, list[Times]] = {name: [] for name in STRATEGIES}
        for number in range(int(rounds)):
            for name in STRATEGIES if number % 2 == 0 else reversed(STRATEGIES):
                found[name].append(started(name, size))
        print(f"{size} ranks, {rounds} rounds; load {os.getloadavg()[0]:.1f}")
        for name, times in found.items():
            tell(name, times, {other: found[other] for other in ("ddp", "off") if other != name})


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        train(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
