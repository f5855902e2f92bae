"""Jobs that tune themselves on emulated links, without a cluster file, beside well-tuned DDP; needs root.

    python -m tests.benchmarks.tuning_inside [seconds=150] [steps=300] [least=100] [out=FILE.jsonl] [plan=FILE.yaml] \
        [halve=0] [recover=0] [PAIR ...]

PAIR is CLUSTER:MODEL[@RATE], and RATE is that of the cluster's fastest link. By default, a ring all-reduce takes `RING`
seconds for up to four ranks, and longer in proportion for more, because all ranks share the cores of one machine. The
rate is chosen so. Where it would be above `FASTEST`, models are made smaller.

First come short jobs of DDP with each of `DDP`'s settings, and second ones with the fastest. These are left out if the
first ones took more than a third of ``seconds``, as on distant links. Then two jobs live on the same links at the same
time: AutoSync's, and that of DDP's fastest settings. They take turns, each `SLICE` steps (A B B A), while the other one
stands still between two steps. So changes of the machine's speed affect both alike. The jobs are shortened, to no less
than ``least`` steps, if the pair would take more than ``seconds``. AutoSync has gradients as views of buffers, as most
of DDP's settings have. With ``plan``, such as one that ``autosync tune`` has found, the other job is not DDP's but
AutoSync's by this plan, without tuning; the columns of DDP are then those of this job. Each pair is a line of the file
``out``; the same command goes on with it.

With ``halve=150 recover=250``, the links of the first node have half their rate from step 150 to step 250; give
``least`` as many steps. For each ten steps, a line tells the median steps of both jobs, and the least that a step can
take by the bound, with the computation of the model.

The table has:

- *DDP*: median of a step with DDP's fastest settings; *at the end*: that of AutoSync's steps with the plan that it has
  at the end; *speedup*: the median, over the slices with that plan, of DDP's median step divided by AutoSync's in the
  same pair of turns, with a bootstrap interval at 95%, and the number of these slices;
- *all steps*: the speedup of all steps from the second on: DDP's time, divided by that of as many of AutoSync's;
- *CPU time, AutoSync / DDP*: of a step with that plan, all ranks together;
- *worst*: the longest of these steps, relative to the median step of the plan that was present then, and the number of
  steps above `SLOW` times that; in brackets the same for DDP;
- *over the first plan*: the speedup of the plan at the end over the job's first plan, by trials;
- *trials cost*: seconds by which the steps up to the last trial's end exceed those of the present plans, as a share of
  2,000 steps; *start*: seconds before the first step beyond DDP's; *load*: runnable processes before and after.
"""

from __future__ import annotations

import math
import os
import select
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import forked  # noqa: E402

from lightning_autosync.cluster import ClusterSpec, Link, ring_time  # noqa: E402
from lightning_autosync.cluster.units import FRAMING  # noqa: E402
from lightning_autosync.errors import AutoSyncError  # noqa: E402
from lightning_autosync.measure.bench.preparation import make_cluster  # noqa: E402
from lightning_autosync.measure.emulation import netns  # noqa: E402
from lightning_autosync.measure.emulation.launch import EmulatedLaunch, shaping_lines  # noqa: E402
from lightning_autosync.measure.launches.settings import LaunchSettings  # noqa: E402
from lightning_autosync.measure.models.recipes import model_of  # noqa: E402
from lightning_autosync.measure.step_time import Interval, paired_ratio  # noqa: E402
from lightning_autosync.measure.workers import WorkerPool  # noqa: E402
from lightning_autosync.plan import SyncPlan  # noqa: E402
from lightning_autosync.replay import least_step  # noqa: E402
from lightning_autosync.run_files import RunFile, alone  # noqa: E402
from lightning_autosync.training.settings import TrainingSettings  # noqa: E402
from tests.benchmarks import tuning_inside_calls as calls  # noqa: E402
from tests.benchmarks.arguments import read_arguments  # noqa: E402

FORMAT = "autosync-tuning-inside/2"
CLUSTERS = (
    "four_equal",
    "two_racks_8to1",
    "ring_of_four",
    "fat_node_star",
    "two_nodes_of_four",
    "two_sites_wan",
    "autosync_b_8",
    "two_racks_2to1",
)
PAIRS = tuple(f"{cluster}:{model}_like" for cluster in CLUSTERS for model in ("vgg", "resnet", "bert"))
"""The rows of the table of docs/measured-jobs.md."""
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
"""Seconds of a ring all-reduce of at most four ranks."""
FASTEST = 200e6
"""Bytes/s of the fastest link, at most: two cores carry no more."""
WARM_UP, SCREENED, SLICE = 2, 4, 10
"""Steps of a short job of DDP that do not count, and that count; steps of a turn."""
NEAR = 1.15
"""A setting has a second short job if its first one took at most this multiple of the fastest one's steps."""
SLOW = 1.5
_LEAST_COMPARED = 3  # steps with the last plan in a slice that counts for the speedup, at least


@dataclass(frozen=True)
class Found:
    """What came of a pair; a line of the file. Times are in seconds.

    Attributes:
        pair: ``CLUSTER:MODEL[@RATE]``.
        fastest: bytes/s of the fastest link.
        size: bytes of gradients.
        screened: median steps of DDP by its settings, one for each short job.
        ddp, ddp_steps: the fastest settings, and the steps of their job.
        steps, plans: AutoSync's, see `tuning_inside_calls.train`.
        cpu, ddp_cpu: CPU seconds of all ranks together, for each of these steps.
        slice: number of steps of a turn.
        start: before the first step, beyond DDP's.
        report: what AutoSync says of its tuning.
        load: runnable processes of the machine before and after the pair (averages of a minute).
        took: seconds of the parts of the measurement, and of the whole pair (``all``).
    """

    pair: str
    fastest: float
    size: int
    screened: dict[str, list[float]]
    ddp: str
    ddp_steps: list[float]
    steps: list[float]
    plans: list[list[int]]
    cpu: list[float]
    ddp_cpu: list[float]
    slice: int
    start: float
    report: dict[str, Any]
    load: list[float]
    took: dict[str, float]

    @property
    def key(self) -> str:
        return self.pair

    @property
    def ddp_step(self) -> float:
        return statistics.median(self.ddp_steps)

    @property
    def final(self) -> float:
        return statistics.median(self._at_the_end(self.steps, 1, len(self.steps)))

    def _at_the_end(self, seconds: list[float], start: int, stop: int) -> list[float]:
        """Those of a range of steps that the plan synchronized that is present at the end."""
        changes, present, _ = self.plans[-1]
        pairs = zip(self.plans[start:stop], seconds[start:stop], strict=True)
        return [each for plans, each in pairs if plans == [changes, present, present]]

    @property
    def processor(self) -> float:
        """CPU time of a step with the plan at the end, relative to DDP's."""
        return statistics.median(self._at_the_end(self.cpu, 1, len(self.cpu))) / statistics.median(self.ddp_cpu)

    @property
    def speedup(self) -> tuple[Interval, int]:
        """DDP's step time divided by AutoSync's, and the number of pairs of turns."""
        theirs, ours = [], []
        for start in range(0, len(self.steps), self.slice):
            stop = start + self.slice
            if len(own := self._at_the_end(self.steps, max(1, start), stop)) >= _LEAST_COMPARED:
                ours.append(statistics.median(own))
                theirs.append(statistics.median(self.ddp_steps[max(1, start) : stop]))
        return paired_ratio(theirs, ours), len(ours)

    @property
    def all_steps(self) -> float:
        """The speedup over all steps from the second on."""
        return sum(self.ddp_steps[1:]) / sum(self.steps[1:])

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
    def worst(self) -> str:
        ddp = [seconds / self.ddp_step for seconds in self.ddp_steps[1:]]
        ours, theirs = (f"{max(steps):.2f}, {sum(each > SLOW for each in steps)}" for steps in (self.relative, ddp))
        return f"{ours} ({theirs})"

    @property
    def over_first(self) -> float:
        """The speedup over the job's first plan, by trials."""
        return math.prod(trial["speedup"] for trial in self.report["trials"] if trial["accepted"])

    @property
    def cost(self) -> float:
        tried = [step for step, (*present, used) in enumerate(self.plans) if present[-1] != used]
        if not tried:
            return 0.0
        # Relative to the present plan's step, and counted up to the step after the last trial.
        return max(0.0, sum(each - 1 for each in self.relative[: tried[-1] + 1])) / 2000


class Job:
    """One job after the other in the processes of a pool.

    Args:
        pool: processes behind the links of the cluster.
        settings: the configuration of the jobs, without their way to synchronize.
        cluster: the cluster, with the rates that its links have.
        directory: an empty folder, for the Trainer's output and for the pipes of `tuning_inside_calls.StepsInTurns`.
    """

    def __init__(self, pool: WorkerPool, settings: dict[str, Any], cluster: ClusterSpec, directory: Path) -> None:
        self._pool, self._settings, self._directory = pool, settings, directory
        self._rest = {"cluster": cluster.to_dict(), "directory": str(directory), "turns": str(directory)}
        names = ["waits", *(f"go.{rank}" for rank in range(cluster.world_size))]
        directory.mkdir()
        for name in names:
            os.mkfifo(directory / name)
        self._waits, *self._go = (os.open(directory / name, os.O_RDWR) for name in names)
        self._under_way: Future[Any] | None = None

    def train(
        self, strategy: str, steps: int, arguments: dict[str, Any], slice: int = 0, plan: SyncPlan | None = None
    ) -> list[dict[str, Any]]:
        """What `tuning_inside_calls.train` returns on each rank."""
        settings = TrainingSettings.parse(
            {**self._settings, "sync": {"strategy": strategy, "arguments": arguments}, "trainer": _trainer(steps)}
        )
        given = None if plan is None else plan.to_dict()
        request = {**self._rest, "settings": settings.model_dump(mode="json"), "slice": slice, "plan": given}
        return self._pool.run(calls.train, request=request)

    def start(self, threads: ThreadPoolExecutor, *arguments: Any) -> None:
        """Start a training that takes turns, and wait until it waits for the first one; arguments as for `train`."""
        self._under_way = threads.submit(self.train, *arguments)
        self._await()

    def turn(self) -> None:
        """Let the training go on for a slice of its steps."""
        self._release()
        self._await()

    def end(self) -> dict[str, Any]:
        """Let the training end after its last turn; returns what it has found on rank 0."""
        self._release()
        assert self._under_way is not None
        found: dict[str, Any] = self._under_way.result()[0]
        return found

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self._waits, *self._go):
            os.close(pipe)

    def _release(self) -> None:
        for pipe in self._go:
            os.write(pipe, b".")

    def _await(self) -> None:
        """Wait until all ranks stand still."""
        assert self._under_way is not None
        missing = len(self._go)
        while missing:
            if select.select([self._waits], [], [], 1.0)[0]:
                missing -= len(os.read(self._waits, missing))
            elif self._under_way.done():
                self._under_way.result()
                raise AutoSyncError("a job has ended before its last turn")


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
        wanted = fastest_of(shipped) * ring_time(shipped, size_of(settings)) / (RING * max(1.0, shipped.world_size / 4))
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
def two_jobs(settings: dict[str, Any], timeout: float) -> Iterator[tuple[EmulatedLaunch, Job, Job]]:
    """Processes for two jobs behind the same emulated links; a job may take ``timeout`` seconds."""
    parsed = TrainingSettings.parse(settings)
    cluster = make_cluster(parsed, None)
    assert isinstance(parsed.launch, LaunchSettings)
    with (
        tempfile.TemporaryDirectory() as directory,
        parsed.launch.open(cluster) as launch,
        WorkerPool(cluster.world_size, launch, timeout=timeout) as one,
        WorkerPool(cluster.world_size, launch, timeout=timeout) as other,
    ):
        assert isinstance(launch, EmulatedLaunch)
        made = [Job(pool, settings, cluster, Path(directory) / name) for name, pool in (("a", one), ("b", other))]
        try:
            yield launch, made[0], made[1]
        finally:
            for job in made:
                job.close()


def scale_links(launch: EmulatedLaunch, node: int, factor: float) -> None:
    """Set the rates of a node's links, in both directions, to ``factor`` times those of the cluster."""
    ports = launch.network.ports  # the two ends of a link follow each other
    for link in zip(ports[::2], ports[1::2], strict=True):
        if node in (link[0].place, link[1].place):
            for port in link:
                slowed = replace(port, rate=factor * port.rate, delay=0.0)
                lines = [line.replace(" add ", " replace ") for line in shaping_lines(slowed, netem=False)]
                netns.configure("tc", lines, launch.namespaces[port.place])


def changed_links(found: Found, halve: int, recover: int = 0) -> Iterator[str]:
    """Lines that tell median steps around changes of links, and the least that a step can take."""
    settings = TrainingSettings.parse(settings_of(found.pair))
    workload, cluster = model_of(settings.model).workload("dense"), make_cluster(settings, None)
    usual, slowed = (least_step(workload, each, FRAMING).seconds for each in (cluster, with_halved_links(cluster, 0)))
    for start in range(0, len(found.steps), found.slice):
        ours, ddp = (statistics.median(job[start : start + found.slice]) for job in (found.steps, found.ddp_steps))
        bound = slowed if halve <= start and not 0 < recover <= start else usual
        yield (
            f"steps {start} to {start + found.slice}: {1e3 * ours:.0f} ms, DDP {1e3 * ddp:.0f} ms, "
            f"bound {1e3 * bound:.0f} ms, {ours / bound - 1:+.0%}"
        )


def with_halved_links(cluster: ClusterSpec, node: int) -> ClusterSpec:
    """The cluster, with half the rates of a node's links."""

    def halved(link: Link) -> Link:
        if cluster.nodes[node].name not in (link.a, link.b):
            return link
        rates = {name: getattr(link, name) / 2 for name in ("bandwidth", "reverse_bandwidth")}
        return link.model_copy(update=rates)

    return cluster.model_copy(update={"links": tuple(map(halved, cluster.links))})


def screen(ddp: Job, seconds: float) -> dict[str, list[float]]:
    """Median steps of short jobs of DDP by its settings; the fastest have a second one if there are ``seconds``."""

    def median_step(name: str) -> float:
        return statistics.median(ddp.train("ddp", WARM_UP + SCREENED, DDP[name])[0]["steps"][WARM_UP:])

    begin = time.monotonic()
    found = {name: [median_step(name)] for name in DDP}
    if time.monotonic() - begin < seconds:
        least = min(first for first, *_ in found.values())
        for name in [name for name in reversed(DDP) if found[name][0] <= NEAR * least]:
            found[name].append(median_step(name))
    return found


def measure(
    pair: str, seconds: float, steps: int, least: int, plan: str = "", halve: int = 0, recover: int = 0
) -> Found:
    """Run the jobs of a pair; the second one by ``plan``, a file, unless that is empty.

    Args:
        halve, recover: steps at which the links of the first node change; 0 for never.

    Raises:
        AutoSyncError: links cannot be emulated, or a rank failed.
    """
    settings, load, clock = settings_of(pair), os.getloadavg()[0], Clock()
    # The threads end last: the end of the processes ends their jobs.
    with ThreadPoolExecutor(2) as threads, two_jobs(settings, 4 * seconds + 60) as (launch, ddp, ours):
        clock.took("processes")
        if plan:
            fixed = {"tuning": "off", "gradient_as_bucket_view": True}
            best, strategy, options, given = plan, "autosync", fixed, SyncPlan.load(plan)
            found = ddp.train(strategy, WARM_UP + SCREENED, options, plan=given)[0]["steps"][WARM_UP:]
            screened = {best: [statistics.median(found)]}
        else:
            screened = screen(ddp, seconds / 3)
            best = min(screened, key=lambda name: min(screened[name]))
            strategy, options, given = "ddp", DDP[best], None
        clock.took("all of DDP")
        # Links are measured and plans searched in some 15 s.
        left = (seconds - clock.seconds["all"] - 15) / 2
        slices = min(steps, max(least, int(left / min(screened[best])))) // SLICE
        ddp.start(threads, strategy, slices * SLICE, options, SLICE, given)
        ours.start(threads, "autosync", slices * SLICE, OURS, SLICE)
        clock.took("start")
        for number in range(slices):
            for step, factor in ((halve, 0.5), (recover, 1.0)):
                if step and number == step // SLICE:
                    scale_links(launch, 0, factor)
            for job in (ddp, ours) if number % 2 == 0 else (ours, ddp):
                job.turn()
        theirs, own = ddp.end(), ours.end()
        clock.took("turns")
    return Found(
        pair=pair,
        fastest=fastest_of(make_cluster(TrainingSettings.parse(settings), None)),
        size=size_of(settings),
        screened=screened,
        ddp=best,
        ddp_steps=theirs["steps"],
        steps=own["steps"],
        plans=own["plans"],
        cpu=own["cpu"],
        ddp_cpu=theirs["cpu"],
        slice=SLICE,
        start=own["start"] - theirs["start"],
        report=own["report"],
        load=[load, os.getloadavg()[0]],
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
    names = "cluster:model,fastest,MB,DDP,of,at the end,speedup,all steps,CPU time AutoSync / DDP,worst,"
    for name in f"{names}over the first plan,trials,trials cost,start,steps,load".split(","):
        made.add_column(name, justify="left" if name in ("cluster:model", "of") else "right")
    for one in found:
        speedup, slices = one.speedup
        made.add_row(
            one.pair,
            f"{8e-6 * one.fastest:.0f} Mbit/s",
            f"{1e-6 * one.size:.1f}",
            f"{1e3 * one.ddp_step:.0f} ms",
            one.ddp,
            f"{1e3 * one.final:.0f} ms",
            f"{speedup.median:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}] {slices}",
            f"{one.all_steps:.2f}x",
            f"{one.processor:.2f}",
            one.worst,
            f"{one.over_first:.2f}x",
            str(len(one.report["trials"])),
            f"{one.cost:.1%}",
            f"{one.start:.1f} s",
            str(len(one.steps)),
            ", ".join(f"{load:.0f}" for load in one.load),
        )
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure the pairs that the file lacks; returns the number of pairs that failed."""
    defaults = {"seconds": "150", "steps": "300", "least": "100", "out": "tuning_inside.jsonl", "plan": ""}
    defaults |= {"halve": "0", "recover": "0"}
    given, names = read_arguments("tuning_inside", arguments, defaults)
    pairs = names or [*PAIRS]
    forked.PRELOADED.append("tests.benchmarks.tuning_inside_calls")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the server of forks
    forked.fork_workers(enter_namespaces=True)
    console, failed = Console(width=None if sys.stdout.isatty() else 200), 0
    with alone(out := Path(given["out"])):
        settings: dict[str, Any] = {name: int(given[name]) for name in ("seconds", "steps", "least")}
        changes = {name: int(given[name]) for name in ("halve", "recover") if given[name] != "0"}
        settings |= changes
        if given["plan"]:
            settings["plan"] = os.path.abspath(given["plan"])
        file = RunFile(out, FORMAT, "jobs that tune themselves", settings, Found, key="out")
        for pair in [each for each in pairs if each not in file.runs]:
            try:
                console.print(f"{pair} ...", markup=False, highlight=False)
                file.append(found := measure(pair, **settings))
            except AutoSyncError as error:
                console.print(f"{pair}: {error}", markup=False, highlight=False)
                failed += 1
                continue
            file.runs[pair] = found
            console.print(f"{pair}: {found.took}; {found.report['tuning']}", markup=False, highlight=False)
            for line in changed_links(found, **changes) if "halve" in changes else ():
                console.print(line, markup=False, highlight=False)
    console.print(table(file.runs[pair] for pair in pairs if pair in file.runs))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
