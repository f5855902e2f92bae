"""What `make demo` runs: a CNN on digits, 4 processes, a plan of mixed architectures, DDP beside it."""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from digits import Digits, loaders
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table

from lightning_autosync import AutoSyncStrategy, ClusterSpec, SyncPlan
from lightning_autosync.cluster import resolve_cluster
from lightning_autosync.measure.bench.output import ddp_legend, result_table
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.models.recipes import Digits as BenchDigits
from lightning_autosync.strategy.choice import choose_plan
from lightning_autosync.workload import describe

RANKS = 4
EPOCHS = 8
MIXED = """
format: autosync-plan/1
world_size: 4
groups:
  - {name: head, variables: [head.bias, head.weight], topology: tree}
  - {name: fc.bias, variables: [fc.bias], architecture: parameter_server, topology: star, placement: [3]}
  - name: fc
    variables: [fc.weight]
    architecture: parameter_server
    topology: star
    partition: {axis: 0, shards: 4}
    placement: [0, 0, 1, 2]
    priority: 1
  - {name: conv2, variables: [features.2.bias, features.2.weight], topology: ring}
  - {name: conv1, variables: [features.0.bias, features.0.weight], topology: native}
"""


class StepTimes(L.Callback):
    """Logs the median time of a training step, in milliseconds."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self._times.append(time.perf_counter() - self._start)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("step_ms", 1e3 * statistics.median(self._times))


def train(strategy: Strategy) -> tuple[Digits, dict[str, float]]:
    """Train on `RANKS` processes; the trained model and what it logged."""
    L.seed_everything(0, verbose=False)
    model = Digits().double()  # the job returns its weights to this model, whose precision they take
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        precision="64-true",  # in single precision, training enlarges differences of rounding on some processors
        max_epochs=EPOCHS,
        callbacks=[StepTimes()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, *loaders())
    return model, {name: float(value) for name, value in trainer.callback_metrics.items()}


def train_beside_ddp(console: Console) -> float:
    """Train by the mixed plan and by DDP; returns the largest difference of any weight."""
    plan = SyncPlan.from_dict(yaml.safe_load(MIXED))
    print(plan.describe(describe(Digits())))
    shape = ClusterSpec.uniform(nodes=1, devices=RANKS)
    contenders: dict[str, Strategy] = {
        "DDP": DDPStrategy(start_method="fork"),
        "AutoSync, the plan above": AutoSyncStrategy(plan=plan, cluster=shape, start_method="fork"),
        "AutoSync, its own choice": AutoSyncStrategy(start_method="fork"),
    }
    table = Table(title=f"digits, {RANKS} processes, {EPOCHS} epochs, double precision", title_justify="left")
    for heading in ("strategy", "median step, ms", "validation accuracy", "largest difference to DDP"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    trained: dict[str, Digits] = {}
    worst = 0.0
    for name, strategy in contenders.items():
        trained[name], metrics = train(strategy)
        gap = difference(trained["DDP"], trained[name])
        worst = max(worst, gap)
        table.add_row(name, f"{metrics['step_ms']:.1f}", f"{metrics['val_accuracy']:.3f}", f"{gap:.1e}")
    console.print(table)
    return worst


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of any weight."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def gain_on_uneven_links(console: Console) -> None:
    """What the strategy would choose for a fat node and three slow ones, measured beside DDP on emulated links."""
    cluster = resolve_cluster("fat_node_star")
    model = {"kind": "digits", "channels": 32, "batch": 32}
    workload = describe(BenchDigits.model_validate(model).module())
    plan, reason = choose_plan(workload, cluster, known=True)
    print(f"\nA CNN on digits where one node has a 400 Mbit/s link and three have 100.\nAutoSync: {reason}.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        plan.save(path)
        settings = {
            "model": model,
            "launch": {"kind": "emulated"},
            "cluster": cluster.to_dict(),
            "ddp": {"bucket_cap_mb": ["default", 1]},
            "contenders": {"AutoSync": {"plan": str(path)}},
        }
        try:
            result = run_bench(BenchSettings.parse(settings))
        except LaunchError as error:
            console.print(f"Not measured: {error}.")
            return
    console.print(result_table(result))
    for line in ddp_legend(result):
        console.print(line, highlight=False)


def main() -> int:
    quieten()
    console = Console(width=max(110, Console().width))
    worst = train_beside_ddp(console)
    equal = worst < 1e-6
    console.print(f"Weights {'equal' if equal else 'DIFFER FROM'} DDP's up to floating-point order ({worst:.1e}).")
    console.print(
        "The plan above shows what plans can say, and is not meant to be fast: on one machine no link is slow, "
        "and each of its messages costs processor time. The strategy's own choice sums gradients in shared memory.",
        highlight=False,
    )
    gain_on_uneven_links(console)
    return 0 if equal else 1


def quieten() -> None:
    """Keep Lightning's own remarks out of the tables; worker processes inherit this."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
