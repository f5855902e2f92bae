"""Rule-based builders: each takes a workload and a cluster and returns a `SyncPlan`.

They are AutoDist's strategy builders, and builders that follow the cluster's links.
"""

from __future__ import annotations

from lightning_autosync.plan.builders.all_reduce import (
    all_reduce,
    partitioned_all_reduce,
    random_axis_partitioned_all_reduce,
    shared_memory,
)
from lightning_autosync.plan.builders.links import hierarchical, packed_trees, parallax
from lightning_autosync.plan.builders.parameter_server import (
    byteps,
    partitioned_ps,
    ps,
    ps_load_balancing,
    uneven_partitioned_ps,
)
from lightning_autosync.plan.builders.registry import Builder, build, find, names, register, relaxed_names
from lightning_autosync.plan.builders.relaxed import asynchronous, bounded_staleness, partial_reduce, periodic
from lightning_autosync.plan.builders.rows import gathered_rows

__all__ = [
    "Builder",
    "all_reduce",
    "asynchronous",
    "bounded_staleness",
    "build",
    "byteps",
    "find",
    "gathered_rows",
    "hierarchical",
    "names",
    "packed_trees",
    "parallax",
    "partial_reduce",
    "partitioned_all_reduce",
    "partitioned_ps",
    "periodic",
    "ps",
    "ps_load_balancing",
    "random_axis_partitioned_all_reduce",
    "register",
    "relaxed_names",
    "shared_memory",
    "uneven_partitioned_ps",
]
