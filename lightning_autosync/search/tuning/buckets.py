"""What Horovod's autotuning searches: the size up to which gradients are fused, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.trial import Trial

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import digest
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.plan.builders.grouping import MIB
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.workload import Workload

PARAMETER = "bucket_mib"
RANGE = (1 / 16, 64.0)
"""MiB; Horovod's own range ends at 64, which is its default too. It fuses from 0 on, here from a message of 64 KiB."""


class BucketSpace:
    """Plans of native all-reduces in buckets of one size; with what a study asks of a space.

    Attributes:
        workload: the variables.
        cluster: where they are synchronized.
        semantics: always ``exact``.
    """

    semantics: Semantics = "exact"
    runs = lone = 0

    def __init__(self, workload: Workload, cluster: ClusterSpec) -> None:
        self.workload = workload
        self.cluster = cluster

    @property
    def fingerprint(self) -> str:
        """Digest of the parameter."""
        return digest([PARAMETER, *RANGE])

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """A point from a trial."""
        return {PARAMETER: trial.suggest_float(PARAMETER, *RANGE, log=True)}

    def plan(self, point: Mapping[str, Any]) -> SyncPlan:
        """The plan that a point stands for."""
        size = int(point[PARAMETER] * MIB)
        return builders.all_reduce(self.workload, self.cluster, bucket_bytes=size, first_bucket_bytes=size)

    def baselines(self) -> list[dict[str, Any]]:
        """Horovod's default."""
        return [{PARAMETER: RANGE[1]}]
