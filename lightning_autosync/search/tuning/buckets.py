"""What Horovod's autotuning searches: the size up to which gradients are fused, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import Trial

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import digest
from lightning_autosync.plan import SyncPlan, builders
from lightning_autosync.plan.builders.grouping import MIB
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.workload import Workload

PARAMETER = "bucket_mib"
MOST = 64.0
"""MiB where the range ends, as Horovod's own, whose default it is too; or with one message of all that there is."""
LEAST, PARTS = 1 / 16, 1024
"""MiB where it begins (Horovod's own begins at 0), or earlier, with this part of all that there is."""


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
        """Digest of the parameter and its range."""
        return digest([PARAMETER, *self.range])

    @property
    def range(self) -> tuple[float, float]:
        """SamplerSizes in MiB between which plans differ."""
        whole = self.workload.bytes / MIB
        return min(LEAST, whole / PARTS), min(MOST, whole)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The parameter as Optuna knows it."""
        return {PARAMETER: FloatDistribution(*self.range, log=True)}

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """A point from a trial."""
        return {PARAMETER: trial.suggest_float(PARAMETER, *self.range, log=True)}

    def plan(self, point: Mapping[str, Any]) -> SyncPlan:
        """The plan that a point stands for."""
        size = int(point[PARAMETER] * MIB)
        return builders.all_reduce(self.workload, self.cluster, bucket_bytes=size, first_bucket_bytes=size)

    def baselines(self) -> list[dict[str, Any]]:
        """Horovod's default."""
        return [{PARAMETER: self.range[1]}]
