"""A plan with all that a page shows of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import bytes_text
from lightning_autosync.plan import Message, Schedule, SyncPlan, compile_plan
from lightning_autosync.replay import Constants, Prediction, Replay
from lightning_autosync.report.figures.cluster import Traffic
from lightning_autosync.report.figures.plan import interface_shares, method_of, reducers
from lightning_autosync.workload import Workload


@dataclass(frozen=True)
class PlanView:
    """A plan with its workload, its schedule and, if the rates of the links are known, its prediction."""

    plan: SyncPlan
    workload: Workload
    schedule: Schedule
    prediction: Prediction | None

    @classmethod
    def of(
        cls,
        plan: SyncPlan,
        workload: Workload,
        cluster: ClusterSpec,
        constants: Constants,
        schedule: Schedule | None = None,
    ) -> PlanView:
        """The view of a plan, which is compiled here if there is no ``schedule`` of it.

        Raises:
            PlanError: the plan is not for this workload and cluster.
        """
        schedule = schedule or compile_plan(plan, workload, cluster)
        prediction = Replay(workload, cluster, constants).predict(schedule) if cluster.measured else None
        return cls(plan, workload, schedule, prediction)

    @property
    def traffic(self) -> Traffic | None:
        if self.prediction is None:
            return None
        return Traffic(self.prediction.step_time, self.prediction.timeline.links)


def message_rows(view: PlanView) -> Iterator[dict[str, Any]]:
    """The rows of the plan's table: one per message, in the plan's order."""
    spans = {} if view.prediction is None else {span.name: span for span in view.prediction.timeline.messages}
    for group, message in zip(view.plan.groups, view.schedule.messages, strict=True):
        shares = reducers(message, view.schedule.world_size)
        span = spans.get(group.name)
        yield {
            "name": group.name,
            "variables": group.variables,
            "size": bytes_text(sum(view.workload.variable(name).bytes for name in group.variables)),
            "method": method_of(group) + _interfaces(message, view.schedule),
            "shards": group.shards,
            "reducers": _who(shares),
            "priority": group.priority,
            "segment": group.segment,
            "span": None if span is None else (1e3 * span.ready, 1e3 * span.start, 1e3 * span.end),
        }


def _interfaces(message: Message, schedule: Schedule) -> str:
    """The shares of a message on the network interfaces, if the plan uses more than the first."""
    count = 1 + max(schedule.interfaces, default=0)
    if count == 1:
        return ""
    used = [f"{share:.0%} over {number}" for number, share in enumerate(interface_shares(message, count)) if share]
    return f", by interface: {', '.join(used)}"


def _who(shares: list[float]) -> str:
    """The ranks that reduce a message, as a short text."""
    taking = [(rank, share) for rank, share in enumerate(shares) if share > 0]
    if len(taking) == len(shares) > 1 and max(shares) - min(shares) < 0.02:
        return "all ranks, equal shares"
    if len(taking) == 1:
        return f"rank {taking[0][0]}"
    return ", ".join(f"{rank}: {share:.0%}" for rank, share in taking)
