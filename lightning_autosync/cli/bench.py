"""``autosync bench``, and with ``timeline=true`` its best plan's step drawn beside the predicted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.bench import command
from lightning_autosync.measure.bench.preparation import make_cluster, prepare
from lightning_autosync.measure.bench.result import Result
from lightning_autosync.measure.bench.settings import Settings
from lightning_autosync.measure.hosts import job_hosts
from lightning_autosync.measure.workers import WorkerPool
from lightning_autosync.plan import SyncPlan
from lightning_autosync.replay import Constants
from lightning_autosync.report.compare import compare_timelines
from lightning_autosync.workload import Workload

_WITHOUT_COMPUTE = ("flat", "paced")


def bench(configuration: dict[str, Any], directory: Path) -> None:
    """Run one bench; ``result.json`` and ``result.png`` appear in ``directory``.

    With ``timeline`` a step of the fastest exact plan is drawn beside the predicted one: ``timeline.svg``,
    ``timeline.png``, ``trace.json`` and ``timelines.json`` appear too.

    Raises:
        AutoSyncError: a setting is wrong, or a worker failed.
    """
    settings = Settings.parse(configuration)
    if not settings.timeline:
        command.bench(configuration, directory)
        return
    _check(settings)
    constants = job_hosts(settings.launch.kind, settings.model.kind in _WITHOUT_COMPUTE, settings.constants)
    result = command.bench(configuration, directory)
    assert result.best_exact is not None  # there is one, as was checked
    _draw(result, result.best_exact, constants, directory)
    print(f"{directory}: timeline.svg, timeline.png, trace.json, timelines.json of contender '{result.best_exact}'")


def _check(settings: Settings) -> None:
    """A timeline can be drawn; it shows before anything is measured."""
    if settings.model.kind not in _WITHOUT_COMPUTE:
        raise DocumentError(
            f"timeline: it shows models that compute by the clock ({' or '.join(_WITHOUT_COMPUTE)}), "
            f"not '{settings.model.kind}'"
        )
    make_cluster(settings).require_measured()
    contenders, classes = settings.all_contenders(), prepare(settings).classes
    if all(one.ddp or one.embeddings == "sparse" or classes[name] != "exact" for name, one in contenders.items()):
        raise DocumentError("timeline: it shows an exact plan, and there is none among the contenders")


def _draw(result: Result, name: str, constants: Constants, directory: Path) -> None:
    order, settings = result.preparation.orders[name], result.settings
    scheduling = None if settings.scheduling == "none" else settings.scheduling
    with (
        settings.launch.open(result.cluster) as launch,
        WorkerPool(result.cluster.world_size, launch, timeout=settings.timeout, scheduling=scheduling) as pool,
    ):
        compare_timelines(
            SyncPlan.from_dict(order["plan"]),
            Workload.from_dict(order["workload"]),
            result.cluster,
            pool,
            directory,
            constants,
        )
