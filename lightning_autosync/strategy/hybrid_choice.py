"""The choice of a hybrid plan by search, or of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_autosync.cluster import ClusterSpec, pack_trees, ring_time
from lightning_autosync.documents import bytes_text
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import AutoSyncError, PlanError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.capture import capture
from lightning_autosync.hybrid.cost import BACKWARD, SYNCHRONIZATION
from lightning_autosync.hybrid.search import Found, HybridCandidate, search
from lightning_autosync.plan.builders.default import shards_time
from lightning_autosync.strategy.choice import LEAST_GAIN
from lightning_autosync.strategy.first_batch import FirstBatch

ASSUMED_BANDWIDTH = "1 Gbit/s"
"""Assumed bandwidth of unknown links, for a model that must be split to fit into memory."""


@dataclass(frozen=True)
class Choice:
    """The result of the choice.

    Attributes:
        plans: plans that split operators, the best first; empty for data parallelism.
        reason: the reason, in one sentence.
        fits: whether data parallelism fits into the allowed memory.
        notes: remarks for the user about the split model, one line each.
        needs: bytes per rank that data parallelism needs; 0 if no memory is given.
    """

    plans: tuple[HybridPlan, ...] = ()
    reason: str = ""
    fits: bool = True
    notes: tuple[str, ...] = field(default=())
    needs: float = 0.0


def choose_hybrid_plan(
    first: FirstBatch | None, cluster: ClusterSpec | None, memory: float | None, nodes: int, devices: int
) -> Choice:
    """Search a plan by the cost model, for this rank's first batch.

    Args:
        first: the model's first batch; None if there is no prediction anyway.
        cluster: the user's cluster; None if unknown.
        memory: bytes that a rank may use; None for no limit.

    Raises:
        PlanError: no plan fits into the memory.
    """
    where, why = _links(cluster, memory, nodes, devices)
    if where is None or first is None:
        return Choice(reason=why)
    try:
        with first.as_forward() as module:
            graph = capture(module, first.batch)
        found = search(graph, where, memory=memory)
    except AutoSyncError as error:
        if memory is not None:
            raise PlanError(f"memory: no plan was found, because the model cannot be searched: {error}") from error
        return Choice(reason=f"the model cannot be searched: {error}")
    return _judge(found, where, memory, why, graph.notes)


def common_choice(own: Choice) -> Choice:
    """One rank's choice, on every rank: that of the first rank whose batch needs the most memory; collective."""
    # With memory given, what fits for the largest batch fits on all ranks. Otherwise this is rank 0's choice.
    data = {**vars(own), "plans": [plan.to_dict() for plan in own.plans]}
    told = max(gather_json(data), key=lambda theirs: float(theirs["needs"]))
    plans = tuple(HybridPlan.from_dict(plan) for plan in told["plans"])
    return Choice(**{**told, "plans": plans, "notes": tuple(told["notes"])})


def _links(
    cluster: ClusterSpec | None, memory: float | None, nodes: int, devices: int
) -> tuple[ClusterSpec | None, str]:
    """The cluster for which plans are made (None if there is none), and a remark about it for the reason."""
    if nodes * devices == 1:
        return None, "there is only one rank, so nothing can be split"
    if cluster is not None and cluster.measured:
        return cluster, f"predicted for cluster '{cluster.name}'"
    unknown = (
        "no cluster is described" if cluster is None else f"the link rates of cluster '{cluster.name}' are unknown"
    )
    if memory is None:
        return None, unknown
    assumed = ClusterSpec.uniform(nodes=nodes, devices=devices, bandwidth=ASSUMED_BANDWIDTH, name="assumed")
    return assumed, f"predicted for links of {ASSUMED_BANDWIDTH}, because {unknown}"


def _judge(found: Found, cluster: ClusterSpec, memory: float | None, why: str, notes: tuple[str, ...]) -> Choice:
    plain, best = found.data_parallel, found.best
    needs = 0.0 if memory is None else float(plain.memory)
    fits = memory is None or needs <= memory
    if memory is not None and best.memory > memory:
        raise PlanError(
            f"memory: no plan fits into {bytes_text(memory)} on each rank; the smallest plan needs "
            f"{bytes_text(best.memory)}"
        )
    plain_seconds = _data_parallel_seconds(plain, cluster)
    split = tuple(
        candidate.plan
        for candidate in found.plans
        if not candidate.plan.is_data_parallel and (not fits or candidate.step_seconds * LEAST_GAIN < plain_seconds)
    )
    times = f"{best.step_seconds:.3g} s a step, against {plain_seconds:.3g} s with data parallelism, {why}"
    if not split:
        reason = f"no split of operators is more than 5% faster: the best plan takes {times}"
        return Choice((), reason, fits, notes, needs)
    if not fits:
        lack = f"data parallelism needs {bytes_text(needs)} on each rank, but {bytes_text(memory or 0.0)} are allowed"
        return Choice(split, f"{lack}; this plan needs {bytes_text(best.memory)} and takes {times}", fits, notes, needs)
    return Choice(split, f"it takes {times}", fits, notes, needs)


def _data_parallel_seconds(plain: HybridCandidate, cluster: ClusterSpec) -> float:
    """Seconds of a data-parallel step with the engine, which may use uneven links better than an all-reduce."""
    if len(cluster.nodes) == 1:
        return plain.step_seconds
    ring = ring_time(cluster, 1.0)
    best = min(ring, shards_time(cluster, 1.0), 1.0 / pack_trees(cluster).rate)
    backward, summing = float(plain.costs[BACKWARD]), float(plain.costs[SYNCHRONIZATION])
    return plain.step_seconds - max(backward, summing) + max(backward, summing * best / ring)
