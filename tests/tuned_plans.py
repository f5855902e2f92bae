"""Entries of the memory of jobs that tune themselves."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import builders
from lightning_autosync.search.memory import Evidence, StepTime, TunedPlan, TuningKey
from lightning_autosync.workload import Variable, Workload

CLUSTER = ClusterSpec.star([4e7, 1e7, 1e7], name="star")
HOSTS = ("red 10.0.0.1", "green 10.0.0.2", "blue 10.0.0.3")
WRITTEN = datetime(2026, 3, 1, 12, 30, tzinfo=timezone.utc)


def workload(width: int = 64, name: str = "small") -> Workload:
    """A model with times."""
    variables = (
        Variable(name="front", shape=(width, 9), ready=0.02),
        Variable(name="wide", shape=(200, 30), kind="row_sparse", rows=8.0, ready=0.01),
        Variable(name="b", shape=(width,), dtype="bfloat16"),
    )
    return Workload(name=name, variables=variables, forward_time=0.01, backward_time=0.02)


def tuned(
    model: Workload | None = None, cluster: ClusterSpec = CLUSTER, hosts: tuple[str, ...] = HOSTS, **changes: Any
) -> TunedPlan:
    """An entry; ``changes`` are arguments of its key, or fields of its own."""
    model = model or workload()
    ours = {name: changes.pop(name) for name in changes.keys() & TunedPlan.model_fields.keys()}
    plan = builders.byteps(model, cluster)
    fields: dict[str, Any] = {
        "plan": plan,
        "origin": "bandwidth-proportional shards",
        "cluster": cluster,
        "evidence": Evidence(
            predicted=0.09,
            measured=StepTime(name="byteps", plan=plan.fingerprint, seconds=0.1, steps=20),
            compared=(StepTime(name="native", plan="0123456789ab", seconds=0.14, steps=24),),
            synchronized_steps=300,
        ),
        "written": WRITTEN,
        "torch": "2.13.0+cpu",
        **ours,
    }
    return TunedPlan(key=TuningKey.of(model, hosts, **{"device": "cpu", **changes}), **fields)
