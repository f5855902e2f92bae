"""``autosync bench``: measure contenders side by side, print the table, write result and figures."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.cli.tables import table_console
from lightning_autosync.errors import DocumentError, UnwritableError
from lightning_autosync.measure.bench.output import draw, remarks, result_table
from lightning_autosync.measure.bench.preparation import make_cluster, prepare
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.run import run_bench
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.hosts import job_hosts, measured_hosts
from lightning_autosync.measure.timelines import measure_timeline
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.report.timeline import compare_timelines
from lightning_autosync.workload import Workload

_WITHOUT_COMPUTE = ("flat", "paced")


def bench(configuration: dict[str, Any], directory: Path) -> BenchResult:
    """Run one bench, and write ``result.json`` and ``result.png`` to ``directory``; returns the result.

    ``result.json`` is rewritten after each round, in case the run is interrupted. If it cannot be written, the bench
    continues, prints its result, and then fails. With ``timeline`` a step of the fastest exact plan is drawn beside the
    predicted step, in ``timeline.svg``, ``timeline.png``, ``trace.json`` and ``timelines.json``.

    Raises:
        AutoSyncError: a setting is wrong, or a worker failed.
        UnwritableError: a file cannot be written.
    """
    settings = BenchSettings.parse(configuration)
    if settings.timeline:
        _check_timeline(settings)
    given = None
    if settings.constants is not None:
        given = job_hosts(settings.launch.kind, settings.model.kind in _WITHOUT_COMPUTE, settings.constants)

    def keep(result: BenchResult) -> None:
        result.document().write(directory)

    def keep_if_possible(result: BenchResult) -> None:
        with suppress(UnwritableError):
            keep(result)

    with ShownProgress("bench") as report:
        result = run_bench(settings, keep_if_possible, report)
    console = table_console()
    console.print(result_table(result))
    for line in remarks(result):
        console.print(line, soft_wrap=True, highlight=False)
    keep(result)
    draw(result, directory / "result.png")
    console.print(f"{directory / 'result.json'}, {directory / 'result.png'}", soft_wrap=True, highlight=False)
    if settings.timeline:
        _draw_timeline(result, given, directory)
    return result


def _check_timeline(settings: BenchSettings) -> None:
    """Raise `DocumentError` if no timeline can be drawn, before anything is measured."""
    if settings.model.kind not in _WITHOUT_COMPUTE:
        raise DocumentError(
            f"timeline: needs a model with paced computation ({' or '.join(_WITHOUT_COMPUTE)}), "
            f"not '{settings.model.kind}'"
        )
    make_cluster(settings, settings.ranks).require_measured()
    contenders, classes = settings.all_contenders(), prepare(settings).classes
    if all(one.ddp or one.embeddings == "sparse" or classes[name] != "exact" for name, one in contenders.items()):
        raise DocumentError("timeline: needs a contender with an exact plan; add one to contenders")


def _draw_timeline(result: BenchResult, constants: Constants | None, directory: Path) -> None:
    """Measure and predict a step; without ``constants``, the workers measure the costs of their hosts."""
    name, settings = result.best_exact, result.settings
    assert name is not None  # `_check_timeline` made sure
    order, cluster = result.preparation.orders[name], result.cluster
    plan, workload = SyncPlan.from_dict(order["plan"]), Workload.from_dict(order["workload"])
    scheduling = None if settings.scheduling == "none" else settings.scheduling
    with (
        settings.launch.open(cluster) as launch,
        WorkerPool(cluster.world_size, launch, timeout=settings.timeout, scheduling=scheduling) as pool,
    ):
        if constants is None:
            constants, told = measured_hosts(pool, settings.launch.kind, paced=True)
            print(told)
        measured = measure_timeline(plan, workload, cluster, pool)
    compare_timelines(measured, plan, workload, cluster, directory, constants)
    print(f"{directory}: timeline.svg, timeline.png, trace.json, timelines.json of contender '{name}'")
