"""The best plan of a run, compiled and priced, and as the rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_autosync.documents import Record, checked
from lightning_autosync.errors import PlanError
from lightning_autosync.measure.hosts import shared_hosts
from lightning_autosync.plan import Schedule, SyncPlan, compile_plan
from lightning_autosync.replay import Constants, Prediction, Replay
from lightning_autosync.replay.constants import Cores
from lightning_autosync.report.figures.cluster import Traffic
from lightning_autosync.report.figures.plan import method_of, reducers
from lightning_autosync.report.tuning.document import RESULT
from lightning_autosync.report.tuning.run import TuningRun


@dataclass(frozen=True)
class PlanView:
    """The best plan, compiled and priced; without a prediction where the links' rates are unknown."""

    plan: SyncPlan
    schedule: Schedule
    prediction: Prediction | None

    @classmethod
    def of(cls, run: TuningRun) -> PlanView | None:
        """Of the best plan of a run, if it has one.

        Raises:
            PlanError: the plan is not for the run's workload and cluster.
        """
        if run.plan is None:
            return None
        try:
            schedule = compile_plan(run.plan, run.workload, run.cluster)
        except PlanError as error:
            raise PlanError(f"{run.directory / RESULT}: best.{error}") from None
        if not run.cluster.measured:
            return cls(run.plan, schedule, None)
        replay = Replay(run.workload, run.cluster, _constants(run))
        return cls(run.plan, schedule, replay.predict(schedule))

    @property
    def traffic(self) -> Traffic | None:
        if self.prediction is None:
            return None
        return Traffic(self.prediction.step_time, self.prediction.timeline.links)


def message_rows(run: TuningRun, view: PlanView) -> Iterator[dict[str, Any]]:
    """The plan as a table: one row a message, in the plan's order."""
    spans = {} if view.prediction is None else {span.name: span for span in view.prediction.timeline.messages}
    for group, message in zip(view.plan.groups, view.schedule.messages, strict=True):
        shares = reducers(message, view.schedule.world_size)
        span = spans.get(group.name)
        yield {
            "name": group.name,
            "variables": group.variables,
            "megabytes": sum(run.workload.variable(name).bytes for name in group.variables) / 1e6,
            "method": method_of(group),
            "shards": group.shards,
            "reducers": _who(shares),
            "priority": group.priority,
            "segment": group.segment,
            "span": None if span is None else (1e3 * span.ready, 1e3 * span.start, 1e3 * span.end),
        }


def _who(shares: list[float]) -> str:
    """``rank 0 half, ...`` in short: all alike, or each rank's percentage."""
    taking = [(rank, share) for rank, share in enumerate(shares) if share > 0]
    if len(taking) == len(shares) > 1 and max(shares) - min(shares) < 0.02:
        return "all ranks, equal shares"
    if len(taking) == 1:
        return f"rank {taking[0][0]}"
    return ", ".join(f"{rank}: {share:.0%}" for rank, share in taking)


def _constants(run: TuningRun) -> Constants:
    """Of the run's hosts: as its settings have them, on as many cores as it noted.

    Raises:
        DocumentError: the file of constants that the run was told is not there any more.
    """
    told = {"constants": run.result.settings.get("constants"), "cores": run.result.environment.get("cores")}
    hosts = checked(_Hosts, told, str(run.directory / RESULT))
    if run.emulated_links and run.paced:
        return shared_hosts(hosts.constants, hosts.cores)
    return Constants() if hosts.constants is None else Constants.load(hosts.constants)


class _Hosts(Record):
    """What a run tells of the constants of its hosts."""

    constants: str | None
    cores: Cores | None
