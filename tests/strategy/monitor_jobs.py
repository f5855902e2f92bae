"""Jobs of two ranks whose synchronization is logged."""

from __future__ import annotations

import csv
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import jobs
import torch.distributed as dist
import yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from tuning_jobs import PAIR, SHORT, counted_switches

from lightning_autosync import AutoSyncStrategy, SyncMonitor, SyncPlan
from lightning_autosync.measure.tcp_info import bytes_sent
from lightning_autosync.plan import compile_plan
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.strategy.tuning import live
from lightning_autosync.strategy.tuning.live import LiveTuner

EVERY = 4


def _fit(strategy: Any, folder: str, max_epochs: int = 2, model: str = "Plain") -> list[dict[str, float]]:
    """The entries with figures that the monitor wrote; empty on other ranks than 0."""
    logger = CSVLogger(folder, name="job", version=0)
    jobs.fit(
        model, strategy, max_epochs=max_epochs, logger=logger, callbacks=[SyncMonitor(EVERY)], log_every_n_steps=50
    )
    return [row for row in _entries(folder) if "autosync/step_time" in row]


def _entries(folder: str) -> list[dict[str, float]]:
    path = Path(folder) / "job" / "version_0" / "metrics.csv"
    if dist.get_rank() or not path.exists():
        return []
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def tuned(folder: str) -> dict[str, Any]:
    """What a job logs that tries plans, of which every second one wins, and what its report and its page say."""
    strategy = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, plans=3))
    ended, finish = list[int](), LiveTuner._finish

    def note_end(self: LiveTuner) -> None:
        ended.append(self.passes)
        finish(self)

    with (
        counted_switches(),
        mock.patch.object(live, "rank_zero_info") as told,
        mock.patch.object(LiveTuner, "_finish", note_end),
    ):
        rows = _fit(strategy, folder, max_epochs=12)
    report = strategy.report()
    assert report is not None
    candidates = [each.plan for each in report.resolution.alternatives]
    workload = report.resolution.workload
    sent = {plan.fingerprint: sent_bytes(compile_plan(plan, workload, PAIR)) for plan in candidates}
    page = Path(folder) / f"{dist.get_rank()}.html"
    report.save(page)
    names = Path(folder) / "job" / "version_0" / "hparams.yaml"
    return {
        "rows": rows,
        "tuning": [(row["step"], row["autosync/tuning"]) for row in _entries(folder) if "autosync/tuning" in row],
        "ended": ended,
        "sent": {plan: each[dist.get_rank()] for plan, each in sent.items() if each is not None},
        "report": report.to_dict(),
        "page": page.read_text(),
        "told": [call.args[0] for call in told.call_args_list],
        "hyperparameters": yaml.safe_load(names.read_text()) if dist.get_rank() == 0 else {},
    }


def bytes_of(folder: str, builder: str) -> dict[str, Any]:
    """The logged bytes of a step beside those that the kernel counts."""
    counts: list[int | None] = []
    strategy = AutoSyncStrategy(plan=builder, cluster=PAIR, check_replicas=0)
    measure = AutoSyncStrategy.step_figures

    def counted(self: AutoSyncStrategy) -> Any:
        counts.append(bytes_sent())
        return measure(self)

    with mock.patch.object(AutoSyncStrategy, "step_figures", counted):
        rows = _fit(strategy, folder, model="Wide")
    known = [each for each in counts if each is not None]
    # The kernel's count falls where a connection was closed, such as one of an earlier job.
    return {"rows": rows, "sent": [(after - before) / EVERY for before, after in pairwise(known) if after > before]}


WATCHED: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": "step", "plan": "ps", "cluster": PAIR, "check_replicas": 0},
    "shares": {"batch_shares": [3, 1], "plan": "all_reduce", "cluster": PAIR},
    "one machine": {},
    "overlap on one machine": {"overlap": "step", "check_replicas": 0},
    "partial_reduce": {"plan": "partial_reduce", "semantics": "relaxed"},
    "asynchronous": {"plan": "asynchronous", "semantics": "relaxed"},
}


def watched(folder: str, kind: str) -> dict[str, Any]:
    """What a job logs, and the fingerprint of its plan."""
    strategy = AutoSyncStrategy(**WATCHED[kind])
    rows = _fit(strategy, folder, model="Wide")
    report = strategy.report()
    page = Path(folder) / f"{dist.get_rank()}.html"
    if report is not None and dist.get_rank() == 0:
        report.save(page)
    assert strategy.plan is not None
    names = Path(folder) / "job" / "version_0" / "hparams.yaml"
    return {
        "rows": rows,
        "plan": strategy.plan.fingerprint,
        "page": page.read_text() if page.exists() else "",
        "report": str(report),
        "hyperparameters": yaml.safe_load(names.read_text()) if dist.get_rank() == 0 else {},
    }


def silent(folder: str) -> dict[str, Any]:
    """The warnings of a job that has none of the metrics."""
    strategy = DDPStrategy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = _fit(strategy, folder)
    return {"rows": rows, "warnings": [str(each.message) for each in caught if "SyncMonitor" in str(each.message)]}


def pinned(folder: str) -> dict[str, Any]:
    """How far a job with the saved plan of another one ends from it, and both plans."""
    first = AutoSyncStrategy(cluster=PAIR, tuning=replace(SHORT, plans=1))
    ours = jobs.fit("Plain", first, max_epochs=2)
    path = Path(folder) / f"{dist.get_rank()}.yaml"
    assert isinstance(first.plan, SyncPlan)
    first.plan.save(path)
    second = AutoSyncStrategy(plan=path, cluster=PAIR)
    theirs = jobs.fit("Plain", second, max_epochs=2)
    assert second.plan is not None
    return {
        "distance": jobs.distance(ours, theirs),
        "plans": [first.plan.fingerprint, second.plan.fingerprint],
        "trials": len(second.report().trials),  # type: ignore[union-attr]
    }
