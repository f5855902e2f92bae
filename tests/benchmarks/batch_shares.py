"""Time to a metric where one of 8 workers is 4 times slower: equal batches against batch shares, and what both cost.

    python -m tests.benchmarks.batch_shares [SEEDS [CONTENDER ...]]

The task, the pace and the speeds are those of ``autosync converge experiment=stragglers``: a CNN learns digits until it
knows 95% of the validation set, and the computation of 16 samples takes 25 ms. Here, the pace is that of samples, so
that a smaller part of a batch takes less. All contenders train in the same live processes, in turn, with the same
batches. Contenders are named as in the table; all train if none is named. The capacity bound is the time of equal
workers times 8 / 7.25, because the slow one makes a quarter of its work.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_autosync import AutoSyncFabricStrategy
from lightning_autosync.lab.convergence.tasks import DigitsTask, loss
from lightning_autosync.lab.convergence.trial import ParameterHistory, judge, time_to
from lightning_autosync.measure.workers import WorkerPool

WORKERS, FACTOR, PACE, TARGET, RATE = 8, 4.0, 0.025, 95.0, 0.1
STEPS = 150
"""Steps of each training, of which some 85 reach the target."""
CONTENDERS: dict[str, tuple[bool, str | list[int] | None]] = {
    "equal workers": (False, None),
    "equal workers, fixed shares": (False, [1] * WORKERS),
    "equal workers, shares": (False, "auto"),
    "one 4x slower": (True, None),
    "one 4x slower, shares": (True, "auto"),
}


def train(slow: bool, shares: str | list[int] | None, seed: int) -> dict[str, Any]:
    """Train once on this rank; the seconds until the metric is reached, and what the last steps took."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    strategy = AutoSyncFabricStrategy("all_reduce", batch_shares=shares)  # type: ignore[arg-type]
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    task = DigitsTask(kind="digits")
    torch.manual_seed(seed)
    module = task.module()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*task.training()), task.batch, shuffle=True))
    pace = PACE / task.batch * (FACTOR if slow and fabric.global_rank == WORKERS - 1 else 1.0)
    history = ParameterHistory(module, 0.0)
    dist.barrier()
    history.begin()
    ends = [time.perf_counter()]
    while len(ends) <= STEPS:
        for inputs, labels in loader:
            begun = time.perf_counter()
            value = loss(model, inputs, labels)
            time.sleep(max(0.0, begun + pace * len(inputs) - time.perf_counter()))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.look()
            ends.append(time.perf_counter())
            if len(ends) > STEPS:
                break
    fabric.strategy.teardown()
    moments = [end - ends[0] for end in ends]
    averages = history.averages(moments)
    scores = judge(module, averages, task.accuracy) if fabric.global_rank == 0 else [100.0] * len(moments)
    steps = [end - begin for begin, end in pairwise(ends)]
    counts = list(fabric.strategy._shares.changes) if shares == "auto" else []
    return {
        "seconds": time_to(TARGET, moments, scores),
        "step": statistics.median(steps[-50:]),
        "mean": statistics.fmean(steps[1:]),
        "changes": [[begin[1], *parts] for begin, parts in counts],
    }


def main(seeds: int = 5, *names: str) -> None:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names or CONTENDERS}
    with WorkerPool(WORKERS, timeout=300.0, extra_paths=[Path(__file__).parents[2]], scheduling="batch") as pool:
        for seed in range(seeds):
            for name in found:
                slow, shares = CONTENDERS[name]
                found[name].append(pool.run(train, slow=slow, shares=shares, seed=seed)[0])
                print(json.dumps({"contender": name, "seed": seed, **found[name][-1]}), flush=True)
    table = Table(title=f"{WORKERS} workers, {seeds} seeds: medians")
    for heading in ("", "seconds to the metric", "ms of a step (mean)", "ms of the last steps"):
        table.add_column(heading)
    for name, runs in found.items():
        seconds, mean, step = (statistics.median(run[key] for run in runs) for key in ("seconds", "mean", "step"))
        table.add_row(name, f"{seconds:.2f}", f"{1e3 * mean:.1f}", f"{1e3 * step:.1f}")
    Console(width=100).print(table)
    if "equal workers" in found:
        equal = statistics.median(run["seconds"] for run in found["equal workers"])
        print(f"capacity bound: {equal * WORKERS / (WORKERS - 1 + 1 / FACTOR):.2f} s")


if __name__ == "__main__":
    from tests.benchmarks.batch_shares import main  # workers look for `train` under this name

    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
