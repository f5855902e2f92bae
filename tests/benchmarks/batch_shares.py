"""Time to a metric where one of 8 workers is 4 times slower: equal batches against batch shares, and what both cost.

    python -m tests.benchmarks.batch_shares [SEEDS [CONTENDER ...]]
    python -m tests.benchmarks.batch_shares turns [ROUNDS]

The task, the pace and the speeds are those of ``autosync converge experiment=stragglers``: a CNN learns digits until it
knows 95% of the validation set, and the computation of 16 samples takes 25 ms. Here, the pace is that of samples, so
that a smaller part of a batch takes less. All contenders train in the same live processes, in turn, with the same
batches. Contenders are named as in the table; all train if none is named. The capacity bound is the time of equal
workers times 8 / 7.25, because the slow one makes a quarter of its work.

``turns`` tells what shares cost among equal workers: three jobs are alive at once, with equal batches, with fixed equal
shares and with "auto", and take turns of 9 steps, in which "auto" exchanges times once. 100 rounds take some three
minutes. The table has the median milliseconds of a step, and the CPU time of a step of all workers together. Beside
both, it has the median ratio to equal batches, paired by round, with its 95% interval. If the interval of the speedup
ends below 1, shares cost time; if it begins above 0.99, they cost less than 1%.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
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
from lightning_autosync.measure.step_time import paired_ratio
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.strategy.shares.auto import CALM

WORKERS, FACTOR, PACE, TARGET, RATE = 8, 4.0, 0.025, 95.0, 0.1
STEPS = 150
"""Steps of each training, of which some 85 reach the target."""
TURN = CALM
"""Steps of a turn: each turn of "auto" has one exchange of times, so that a median over turns does not leave it out."""
WARM_UP = 5 * TURN
"""Steps before the first turn, after which "auto" exchanges times as rarely as in a long job."""
CONTENDERS: dict[str, tuple[bool, str | list[int] | None]] = {
    "equal workers": (False, None),
    "equal workers, fixed shares": (False, [1] * WORKERS),
    "equal workers, shares": (False, "auto"),
    "one 4x slower": (True, None),
    "one 4x slower, shares": (True, "auto"),
}


class Job:
    """One training on this rank, step by step.

    Args:
        slow: whether the last worker is slower.
        shares: the argument ``batch_shares``.
        seed: seed of the weights.

    Attributes:
        ends: times at which training began and steps ended.
    """

    def __init__(self, slow: bool, shares: str | list[int] | None, seed: int) -> None:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        self.strategy = AutoSyncFabricStrategy("all_reduce", batch_shares=shares)  # type: ignore[arg-type]
        environment = [TorchElasticEnvironment()]
        fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=self.strategy, plugins=environment)
        fabric.launch()
        self.task = DigitsTask(kind="digits")
        torch.manual_seed(seed)
        self.module = self.task.module()
        optimizer = torch.optim.SGD(self.module.parameters(), lr=RATE, momentum=0.9)
        self._model, self._optimizer = fabric.setup(self.module, optimizer)
        data = DataLoader(TensorDataset(*self.task.training()), self.task.batch, shuffle=True)
        self._loader: Any = fabric.setup_dataloaders(data)
        self._pace = PACE / self.task.batch * (FACTOR if slow and fabric.global_rank == WORKERS - 1 else 1.0)
        self.history = ParameterHistory(self.module, 0.0)
        self._batches = self._every_batch()
        dist.barrier()
        self.history.begin()
        self.ends = [time.perf_counter()]

    def _every_batch(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def train(self, steps: int) -> None:
        """Make some steps."""
        for inputs, labels in islice(self._batches, steps):
            begun = time.perf_counter()
            value = loss(self._model, inputs, labels)
            time.sleep(max(0.0, begun + self._pace * len(inputs) - time.perf_counter()))
            value.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.history.look()
            self.ends.append(time.perf_counter())


def train(slow: bool, shares: str | list[int] | None, seed: int) -> dict[str, Any]:
    """Train once on this rank; the seconds until the metric is reached, and what the last steps took."""
    job = Job(slow, shares, seed)
    job.train(STEPS)
    job.strategy.teardown()
    moments = [end - job.ends[0] for end in job.ends]
    averages = job.history.averages(moments)
    scores = judge(job.module, averages, job.task.accuracy) if dist.get_rank() == 0 else [100.0] * len(moments)
    steps = [end - begin for begin, end in pairwise(job.ends)]
    counts = list(job.strategy._shares.changes) if shares == "auto" else []  # type: ignore[union-attr]
    return {
        "seconds": time_to(TARGET, moments, scores),
        "step": statistics.median(steps[-50:]),
        "mean": statistics.fmean(steps[1:]),
        "changes": [[begin[1], *parts] for begin, parts in counts],
    }


_live: dict[str, Job] = {}


def begin(name: str) -> None:
    """Begin the training of a contender."""
    slow, shares = CONTENDERS[name]
    _live[name] = Job(slow, shares, 0)


def turn(name: str, steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds of a step of this rank, the mean over some steps."""
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    _live[name].train(steps)
    return (time.perf_counter() - begun) / steps, (time.process_time() - used) / steps


def end(name: str) -> list[Any]:
    """End the training of a contender; the changes of its shares."""
    shares = _live.pop(name).strategy._shares
    return getattr(shares, "changes", [])


def take_turns(rounds: int = 100) -> None:
    """Measure what shares cost among equal workers, and print a table."""
    names = [name for name, (slow, _) in CONTENDERS.items() if not slow]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with WorkerPool(WORKERS, timeout=300.0, extra_paths=[Path(__file__).parents[2]], scheduling="batch") as pool:
        for name in names:
            pool.run(begin, name=name)
            pool.run(turn, name=name, steps=WARM_UP)
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                ranks = pool.run(turn, name=name, steps=TURN)
                found[name].append((max(each for each, _ in ranks), sum(used for _, used in ranks)))
        for name in names:
            print(name, "changes", pool.run(end, name=name)[0])
    table = Table(title=f"{WORKERS} equal workers, {rounds} rounds of {TURN} steps")
    for heading in ("", "ms of a step", "speedup over equal batches", "CPU ms of a step", "times equal batches"):
        table.add_column(heading)
    equal, equal_cpu = zip(*found[names[0]], strict=True)
    for name, turns in found.items():
        seconds, used = zip(*turns, strict=True)
        ratios = paired_ratio(equal, seconds), paired_ratio(used, equal_cpu)
        speedup, cost = (f"{each.median:.3f} ({each.low:.3f} to {each.high:.3f})" for each in ratios)
        table.add_row(
            name, f"{1e3 * statistics.median(seconds):.1f}", speedup, f"{1e3 * statistics.median(used):.1f}", cost
        )
    Console(width=120).print(table)


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
    from tests.benchmarks import batch_shares  # workers look for its functions under this name

    if sys.argv[1:2] == ["turns"]:
        batch_shares.take_turns(*map(int, sys.argv[2:3]))
    else:
        batch_shares.main(*map(int, sys.argv[1:2]), *sys.argv[2:])
