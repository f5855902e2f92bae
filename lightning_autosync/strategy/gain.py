"""What a job would gain over DDP, by prediction and without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.bench.settings import BucketCap, DDPSweep
from lightning_autosync.measure.models.model import MIB, with_kind
from lightning_autosync.plan import Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.plan.traffic import sent_bytes
from lightning_autosync.replay import Constants, Replay, least_step, overlapped_step_time
from lightning_autosync.replay.shares import micro_batched, shared_step_time
from lightning_autosync.report.gain import CHOICE, GainResult, GainRow, Kind
from lightning_autosync.report.predict import CUT_BOUND
from lightning_autosync.strategy.choice import choose_plan
from lightning_autosync.strategy.overlap import why_no_overlap
from lightning_autosync.strategy.tuning.proposals import DESCRIBED, JobLinks, order_plans, search_plans
from lightning_autosync.strategy.tuning.settings import TuningSettings
from lightning_autosync.workload import Workload


@dataclass(frozen=True)
class _Price:
    """A row before its speedup is known."""

    kind: Kind
    name: str
    seconds: float
    plan: SyncPlan | None = None
    schedule: Schedule | None = None

    def row(self, best: float) -> GainRow:
        """The row, with its speedup over the best DDP, whose step takes ``best`` seconds."""
        found = GainRow(kind=self.kind, name=self.name, step_time=self.seconds, speedup=best / self.seconds)
        if self.plan is None or self.schedule is None:
            return found
        sent = sent_bytes(self.schedule)
        return found.model_copy(
            update={
                "sent": None if sent is None else sum(sent) / len(sent),
                "messages": len(self.schedule.messages),
                "topologies": tuple(sorted({group.topology for group in self.plan.groups})),
            }
        )


def check_ranks(cluster: ClusterSpec) -> None:
    """Refuse a cluster of one rank.

    Raises:
        DocumentError: it has one rank.
    """
    if cluster.world_size == 1:
        raise DocumentError(f"cluster: '{cluster.name}' has one rank, so nothing is synchronized; give two or more")


def predict_gain(
    workload: Workload,
    cluster: ClusterSpec,
    constants: Constants,
    ddp: DDPSweep,
    tuning: TuningSettings,
    micro_batches: tuple[int, int] | None = None,
) -> GainResult:
    """Predict a step of DDP, of AutoSync's choice with each option that applies, of each builder, and the bound.

    Args:
        workload: the parameters and the times of a step.
        cluster: a cluster with known rates and at least two ranks.
        constants: constants of the hosts.
        ddp: settings of DDP. The replay distinguishes only sizes of buckets.
        tuning: settings of the search for AutoSync's choice.
        micro_batches: the samples of a data loader's batch and of a micro-batch, for a row with both.

    Raises:
        ClusterError: the rates of the cluster are unknown.
        DocumentError: the cluster has one rank only, or the global batch no whole number of micro-batches.
    """
    check_ranks(cluster)
    replay = Replay(workload, cluster, constants)
    settings = _of_ddp(workload, cluster, constants, ddp)
    plan, reason = choose_without_trials(workload, cluster, constants, tuning)
    other, _ = choose_without_trials(workload, cluster, constants, tuning, overlaps=True)
    chosen = _of_choice(plan, other, workload, cluster, replay, constants, micro_batches)
    built, left_out = _of_builders(workload, cluster, replay)
    bound = least_step(workload, cluster, constants.framing, constants.burst)
    # Emulated links may pass small gradients in one burst; the bound is then 0 and says nothing.
    least = [_Price("bound", "bound without overlap", bound.seconds)] if bound.seconds > 0 else []
    best = settings[0].seconds
    return GainResult(
        workload=workload.name,
        cluster=cluster.name,
        bytes=workload.bytes,
        world_size=cluster.world_size,
        computes=workload.forward_time + workload.backward_time > 0,
        reason=reason,
        bounds_are="exact" if bound.exact else CUT_BOUND,
        rows=tuple(price.row(best) for price in (*settings, *chosen, *built, *least)),
        left_out=left_out,
    )


def choose_without_trials(
    workload: Workload, cluster: ClusterSpec, constants: Constants, tuning: TuningSettings, overlaps: bool = False
) -> tuple[SyncPlan, str]:
    """The plan by which a job on CPUs begins if its user gives none, with the reason.

    A job chooses before its first step, so it knows neither the times of the computation nor the touched rows.

    Args:
        cluster: the cluster of the job.
        constants: constants of the hosts.
        overlaps: whether steps overlap with the next forward pass (``overlap="step"``).
    """
    unknown = {"ready": None, "rows": None}
    workload = workload.model_copy(
        update={
            "variables": tuple(variable.model_copy(update=unknown) for variable in workload.variables),
            **dict.fromkeys(("forward_time", "backward_time", "optimizer_time"), 0.0),
        }
    )
    if len(cluster.nodes) == 1 or not cluster.measured:
        return choose_plan(workload, cluster, known=True, shares_cores=True)
    links = JobLinks(cluster, constants, origin=DESCRIBED)
    found = order_plans(search_plans(workload, links, tuning, overlaps=overlaps), links, overlaps)
    return found.plans[0].plan, found.reason


def _of_ddp(workload: Workload, cluster: ClusterSpec, constants: Constants, ddp: DDPSweep) -> list[_Price]:
    """DDP with each size of buckets, the fastest first. It sends whole gradients of tables, unless they are sparse."""
    tables = {variable.name for variable in workload.variables if variable.kind == "row_sparse"}
    whole = with_kind(workload, tables, "dense")
    replay = Replay(whole, cluster, constants)
    prices = []
    for cap in dict.fromkeys(ddp.bucket_cap_mb):
        plan = builders.all_reduce(whole, cluster, **_bucket_sizes(cap))
        schedule = compile_plan(plan, whole, cluster)
        size = "default buckets" if cap == "default" else f"{cap:g} MiB buckets"
        prices.append(_Price("ddp", f"DDP, {size}", replay.predict(schedule).step_time, plan, schedule))
    return sorted(prices, key=lambda price: price.seconds)


def _bucket_sizes(cap: BucketCap) -> dict[str, Any]:
    """Arguments of `all_reduce`. If its user gives DDP a size, the first bucket has this size, too."""
    if cap == "default":
        return {}
    size = max(1, round(cap * MIB))
    return {"bucket_bytes": size, "first_bucket_bytes": size}


def _of_choice(
    plan: SyncPlan,
    overlapping: SyncPlan,
    workload: Workload,
    cluster: ClusterSpec,
    replay: Replay,
    constants: Constants,
    micro_batches: tuple[int, int] | None,
) -> Iterator[_Price]:
    """AutoSync's choice alone, and with overlap where the engine can; both with batch shares where speeds differ, and
    micro-batches."""
    schedule, other = (compile_plan(each, workload, cluster) for each in (plan, overlapping))
    yield _Price("choice", CHOICE["choice"], replay.predict(schedule).step_time, plan, schedule)
    ways: list[tuple[Kind, SyncPlan, Schedule]] = [("shares", plan, schedule)]
    if not why_no_overlap(overlapping, other):
        seconds = overlapped_step_time(other, workload, replay)
        yield _Price("overlap", CHOICE["overlap"], seconds, overlapping, other)
        ways.append(("shares_overlap", overlapping, other))
    for kind, chosen, compiled in ways:
        shared = shared_step_time(compiled, workload, cluster, constants, overlaps=kind == "shares_overlap")
        if shared is not None:
            yield _Price(kind, CHOICE[kind], shared, chosen, compiled)
    if micro_batches is not None:
        found = micro_batched(schedule, workload, cluster, constants, *micro_batches)
        name = f"{CHOICE['shares']}, micro_batch={found.samples} ({found.told})"
        yield _Price("micro_batches", name, found.step_time, plan, schedule)


def _of_builders(workload: Workload, cluster: ClusterSpec, replay: Replay) -> tuple[list[_Price], dict[str, str]]:
    """Exact plans of the builders with their defaults, the fastest first; and why other builders do not apply."""
    prices, left_out = [], {}
    for name in builders.names():
        try:
            plan = builders.build(name, workload, cluster)
            if plan.semantics != "exact":
                raise DocumentError(f"its plan is {plan.semantics}")
            schedule = compile_plan(plan, workload, cluster)
        except DocumentError as error:
            left_out[name] = str(error)
        else:
            prices.append(_Price("builder", name, replay.predict(schedule).step_time, plan, schedule))
    return sorted(prices, key=lambda price: price.seconds), left_out
