"""Jobs that tune themselves on emulated links, without a cluster file, beside well-tuned DDP; needs root.

    python -m tests.benchmarks.tuning_inside [seconds=60] [steps=200] [out=FILE.jsonl] [CLUSTER:MODEL[@RATE] ...]

RATE is that of the cluster's fastest link. By default, a ring all-reduce takes `RING` seconds: the rate is chosen so,
and where that would be above `FASTEST`, models are made smaller.

The jobs of a pair run one after the other in the same processes: a short one for each of `DDP`'s settings, the fastest
of these for longer, AutoSync's, and the fastest of DDP once more. AutoSync's job is shortened if the pair would take
more than ``seconds``. It has gradients as views of buffers, as most of DDP's settings have. Each pair is a line of the
file ``out``; the same command goes on with it. The table has, for each pair:

- *DDP*: median of a step with DDP's fastest settings, in the jobs before and after AutoSync's; *at the end*: that of
  AutoSync's last `LAST` steps with the plan that it has at the end; *speedup*: DDP's divided by it;
- *all steps*: the time of AutoSync's steps from the second on, divided by that of as many steps of DDP;
- *worst*: the longest of these steps, relative to the median step of the plan that was present then; in brackets the
  longest step of DDP, relative to its median;
- *first plan*: how much longer its steps are than those of the fastest plan that was found (regret), by trials;
- *trials cost*: seconds by which the steps up to the last trial's end exceed those of the present plans, as a share of
  2,000 steps; *start*: seconds before the first step beyond DDP's.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import forked  # noqa: E402

from lightning_autosync.cluster import ClusterSpec, ring_time  # noqa: E402
from lightning_autosync.errors import AutoSyncError  # noqa: E402
from lightning_autosync.measure.bench.preparation import make_cluster  # noqa: E402
from lightning_autosync.measure.launches.settings import LaunchSettings  # noqa: E402
from lightning_autosync.measure.models.recipes import model_of  # noqa: E402
from lightning_autosync.measure.workers import WorkerPool  # noqa: E402
from lightning_autosync.run_files import RunFile, alone  # noqa: E402
from lightning_autosync.training.settings import TrainingSettings  # noqa: E402
from tests.benchmarks import tuning_inside_calls as calls  # noqa: E402

FORMAT = "autosync-tuning-inside/1"
PAIRS = (
    "fat_node_star:vgg_like",
    "four_equal:vgg_like",
    "ring_of_four:resnet_like",
    "two_racks_8to1:resnet_like",
    "four_racks_of_two:bert_like",
    "fat_node_star:bert_like",
    "four_equal:resnet_like",
    "ring_of_four:bert_like",
    "two_nodes_of_four:vgg_like",
    "two_sites_wan:resnet_like",
)
WELL = {"gradient_as_bucket_view": True, "static_graph": True}
DDP: dict[str, dict[str, Any]] = {
    "25 MiB": WELL,  # the default, with a first bucket of 1 MiB
    "1 MiB": {**WELL, "bucket_cap_mb": 1},
    "5 MiB": {**WELL, "bucket_cap_mb": 5},
    "100 MiB": {**WELL, "bucket_cap_mb": 100},
    "1, 4, 16 MiB": {**WELL, "bucket_cap_mb_list": [1, 4, 16]},
    "batched copies": {"static_graph": True, "batched_grad_copy": True},
}
OURS = {"cluster": "auto", "tuning": {"cache": None}, "gradient_as_bucket_view": True}
RING = 0.12
FASTEST = 200e6
"""Bytes/s of the fastest link, at most: two cores carry no more."""
WARM_UP, SCREENED, MEASURED = 2, 6, 12
"""Steps of a job of DDP that do not count, and that count in the short and in the longer jobs."""
LEAST = 100
"""Steps of AutoSync's job, at least."""
LAST = 40


@dataclass(frozen=True)
class Found:
    """What came of a pair; a line of the file. Times are in seconds.

    Attributes:
        pair: ``CLUSTER:MODEL[@RATE]``.
        fastest: bytes/s of the fastest link.
        size: bytes of gradients.
        screened: median step of DDP by its settings.
        ddp, ddp_steps: the fastest settings, and their steps.
        steps, plans: AutoSync's, see `tuning_inside_calls.train`.
        start: before the first step, beyond DDP's.
        report: what AutoSync says of its tuning.
        load: runnable processes of the machine before the pair (average of a minute).
        took: seconds of the jobs, by name, and of the whole pair (``all``).
    """

    pair: str
    fastest: float
    size: int
    screened: dict[str, float]
    ddp: str
    ddp_steps: list[float]
    steps: list[float]
    plans: list[list[int]]
    start: float
    report: dict[str, Any]
    load: float
    took: dict[str, float]

    @property
    def key(self) -> str:
        return self.pair

    @property
    def ddp_step(self) -> float:
        return statistics.median(self.ddp_steps)

    @property
    def final(self) -> float:
        *present, _ = self.plans[-1]
        pairs = zip(self.plans[1:], self.steps[1:], strict=True)
        return statistics.median([seconds for plans, seconds in pairs if plans == [*present, present[-1]]][-LAST:])

    @property
    def speedup(self) -> float:
        return self.ddp_step / self.final

    @property
    def all_steps(self) -> float:
        return sum(self.steps[1:]) / (len(self.steps) - 1) / self.ddp_step

    @property
    def relative(self) -> list[float]:
        """Each step from the second on, relative to the median step of the plan that was present then."""
        own = defaultdict(list)
        for (*present, used), seconds in zip(self.plans[1:], self.steps[1:], strict=True):
            if present[-1] == used:
                own[tuple(present)].append(seconds)
        usual = {present: statistics.median(seconds) for present, seconds in own.items()}
        pairs = zip(self.plans[1:], self.steps[1:], strict=True)
        return [seconds / usual.get(tuple(present), self.final) for (*present, _), seconds in pairs]

    @property
    def worst(self) -> float:
        return max(self.relative)

    @property
    def regret(self) -> float:
        return math.prod(trial["speedup"] for trial in self.report["trials"] if trial["accepted"])

    @property
    def cost(self) -> float:
        tried = [step for step, (*present, used) in enumerate(self.plans) if present[-1] != used]
        if not tried:
            return 0.0
        # Relative to the present plan's step, and counted up to the step after the last trial.
        return max(0.0, sum(each - 1 for each in self.relative[: tried[-1] + 1])) / 2000


class Jobs:
    """Runs the jobs of a pair in the processes of a pool.

    Args:
        pool: processes behind the links of the cluster.
        settings: the configuration of the jobs, without their way to synchronize.
        cluster: the cluster, with the rates that its links have.
        directory: folder for the Trainer's output.

    Attributes:
        fastest: bytes/s of the fastest link.
    """

    def __init__(self, pool: WorkerPool, settings: dict[str, Any], cluster: ClusterSpec, directory: str) -> None:
        self._pool, self._settings = pool, settings
        self._rest = {"cluster": cluster.to_dict(), "plan": None, "directory": directory}
        self.fastest = fastest_of(cluster)

    def train(self, strategy: str, steps: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """What `tuning_inside_calls.train` returns on each rank."""
        settings = TrainingSettings.parse(
            {**self._settings, "sync": {"strategy": strategy, "arguments": arguments}, "trainer": _trainer(steps)}
        )
        return self._pool.run(calls.train, request={"settings": settings.model_dump(mode="json"), **self._rest})

    def ddp(self, name: str, steps: int) -> tuple[list[float], float]:
        """The counted steps of a job of DDP, and its seconds before the second step."""
        found = self.train("ddp", WARM_UP + steps, DDP[name])[0]
        return found["steps"][WARM_UP:], found["seconds"] - sum(found["steps"][1:])


def _trainer(steps: int) -> dict[str, Any]:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return {"max_steps": steps, "max_epochs": -1, "accelerator": "cpu", **quiet}


def settings_of(pair: str) -> dict[str, Any]:
    """The configuration of a pair's jobs, with the rate of the fastest link."""
    names, _, rate = pair.partition("@")
    cluster, _, model = names.partition(":")
    settings: dict[str, Any] = {"launch": {"kind": "emulated"}}
    for kind, name in (("cluster", cluster), ("model", model)):
        settings[kind] = yaml.safe_load((ROOT / "conf" / kind / f"{name}.yaml").read_text())
    if not rate:
        shipped = make_cluster(TrainingSettings.parse(settings), None)
        wanted = fastest_of(shipped) * ring_time(shipped, size_of(settings)) / RING
        rate = f"{8e-6 * min(FASTEST, wanted):.0f} Mbit/s"
        settings["model"]["scale"] *= min(1.0, FASTEST / wanted)
    return {**settings, "cluster_fastest": rate}


def size_of(settings: dict[str, Any]) -> int:
    """Bytes of gradients of the model in the configuration of a job."""
    return model_of(settings["model"]).workload("dense").bytes


def fastest_of(cluster: ClusterSpec) -> float:
    """Bytes/s of the fastest link."""
    return max(each for link in cluster.links for each in (link.bandwidth, link.reverse_bandwidth) if each)


@contextmanager
def running_jobs(settings: dict[str, Any], timeout: float) -> Iterator[Jobs]:
    """Processes behind emulated links that run the jobs of a pair; a job may take ``timeout`` seconds."""
    parsed = TrainingSettings.parse(settings)
    cluster = make_cluster(parsed, None)
    assert isinstance(parsed.launch, LaunchSettings)
    with (
        tempfile.TemporaryDirectory() as directory,
        parsed.launch.open(cluster) as launch,
        WorkerPool(cluster.world_size, launch, timeout=timeout) as pool,
    ):
        yield Jobs(pool, settings, cluster, directory)


def measure(pair: str, seconds: float, steps: int) -> Found:
    """Run the jobs of a pair.

    Raises:
        AutoSyncError: links cannot be emulated, or a rank failed.
    """
    settings, load, clock = settings_of(pair), os.getloadavg()[0], Clock()
    with running_jobs(settings, 2 * seconds + 60) as jobs:
        clock.took("processes")
        screened = {name: statistics.median(jobs.ddp(name, SCREENED)[0]) for name in DDP}
        best = min(screened, key=screened.__getitem__)
        clock.took("all of DDP")
        before, start = jobs.ddp(best, MEASURED)
        clock.took("DDP before")
        # The job after AutoSync's takes as long as the one before; links are measured and plans searched in some 10 s.
        left = seconds - clock.seconds["all"] - clock.seconds["DDP before"] - 10
        ours = jobs.train("autosync", min(steps, max(LEAST, int(left / screened[best]))), OURS)[0]
        clock.took("AutoSync")
        after, start_after = jobs.ddp(best, MEASURED)
        clock.took("DDP after")
    own_start = ours["seconds"] - sum(ours["steps"][1:])
    return Found(
        pair=pair,
        fastest=jobs.fastest,
        size=size_of(settings),
        screened=screened,
        ddp=best,
        ddp_steps=before + after,
        steps=ours["steps"],
        plans=ours["plans"],
        start=own_start - statistics.mean([start, start_after]),
        report=ours["report"],
        load=load,
        took=clock.seconds,
    )


class Clock:
    """Seconds of the parts of a measurement, and of all of them together."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def took(self, name: str) -> None:
        """A part has ended."""
        now = time.monotonic()
        self.seconds |= {name: round(now - self._last, 2), "all": round(now - self._begin, 2)}
        self._last = now


def table(found: Iterable[Found]) -> Table:
    """The table that the module's docstring explains."""
    made = Table(title="jobs that tune themselves, without a cluster file")
    names = ("cluster:model", "fastest", "MB", "DDP", "of", "at the end", "speedup", "all steps", "worst", "first plan")
    for name in (*names, "trials", "trials cost", "start", "steps"):
        made.add_column(name, justify="left" if name in ("cluster:model", "of") else "right")
    for one in found:
        made.add_row(
            one.pair,
            f"{8e-6 * one.fastest:.0f} Mbit/s",
            f"{1e-6 * one.size:.1f}",
            f"{1e3 * one.ddp_step:.0f} ms",
            one.ddp,
            f"{1e3 * one.final:.0f} ms",
            f"{one.speedup:.2f}x",
            f"{one.all_steps:.2f}",
            f"{one.worst:.2f} ({max(one.ddp_steps) / one.ddp_step:.2f})",
            f"{one.regret:.2f}",
            str(len(one.report["trials"])),
            f"{one.cost:.1%}",
            f"{one.start:.1f} s",
            str(len(one.steps)),
        )
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure the pairs that the file lacks; returns the number of pairs that failed."""
    given = {"seconds": "60", "steps": "200", "out": "tuning_inside.jsonl"}
    named = [argument for argument in arguments if "=" in argument]
    pairs = [argument for argument in arguments if argument not in named] or [*PAIRS]
    for key, _, value in (argument.partition("=") for argument in named):
        if key not in given:
            raise SystemExit(f"tuning_inside: '{key}': expected one of {', '.join(given)}\n\n{__doc__}")
        given[key] = value
    forked.PRELOADED.append("tests.benchmarks.tuning_inside_calls")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the server of forks
    forked.fork_workers(enter_namespaces=True)
    console, failed = Console(width=None if sys.stdout.isatty() else 170), 0
    with alone(out := Path(given["out"])):
        settings = {"seconds": float(given["seconds"]), "steps": int(given["steps"])}
        file = RunFile(out, FORMAT, "jobs that tune themselves", settings, Found)
        for pair in [each for each in pairs if each not in file.runs]:
            try:
                file.append(found := measure(pair, settings["seconds"], int(settings["steps"])))
            except AutoSyncError as error:
                console.print(f"{pair}: {error}", markup=False, highlight=False)
                failed += 1
                continue
            file.runs[pair] = found
            console.print(f"{pair}: {found.took}; {found.report['tuning']}", markup=False, highlight=False)
    console.print(table(file.runs[pair] for pair in pairs if pair in file.runs))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
