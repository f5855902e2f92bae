"""`Entry`: a sample with the conditions under which it was measured, and its plain form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import canonical, digest, digest_text, parse_json
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.dataset.sample import Sample, check_steps
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload

Row = dict[str, Any]
"""An entry as plain data: the columns of `COLUMNS`, documents by fingerprint, the plan as canonical JSON."""

COLUMNS = {
    "workload": "fingerprint of the workload",
    "cluster": "fingerprint of the cluster",
    "environment": "fingerprint of what it ran on: versions, kernel, processor, cores, TCP algorithm",
    "plan": "the plan as canonical JSON (keys sorted, no blanks)",
    "kind": "how the plan came about: reference, buckets, the name of a builder, free, drawn or evolved",
    "seed": "of the draw",
    "steps": "seconds of each step, of the slowest rank, in order; warm-up left out",
    "replayed": "seconds of a step as the replay priced it then; null if it did not",
    "reference": "seconds of a step of the pair's reference plan, measured again just before; null if it was not",
    "foreign_cores": "cores that other processes kept busy meanwhile; null where unknown",
    "load": "load average of the last minute; null where unknown",
    "disturbed": "whether that was more than the collection allowed; left out of training by default",
    "measured_at": "seconds since 1970, UTC",
}
"""The columns of samples and what they mean."""
PAIR = ("workload", "cluster", "plan")
"""The columns that name a pair: two rows with the same ones measured the same thing."""
DOCUMENTS = ("workload", "cluster", "environment")
"""The columns that name documents, which are the kinds of these."""


@dataclass(frozen=True)
class Conditions:
    """When and beside what a sample was measured.

    Attributes:
        environment: what it ran on, plain data that is the same for a whole run.
        seed: of the draw.
        foreign_cores: cores that other processes kept busy meanwhile; None where unknown.
        load: load average of the last minute; None where unknown.
        disturbed: whether others kept more cores busy than was allowed.
        measured_at: seconds since 1970.
    """

    environment: dict[str, Any]
    seed: int = 0
    foreign_cores: float | None = None
    load: float | None = None
    disturbed: bool = False
    measured_at: int = 0


@dataclass(frozen=True)
class Entry:
    """A sample and its conditions."""

    sample: Sample
    conditions: Conditions

    def documents(self) -> dict[str, dict[str, Any]]:
        """The documents that a row names by fingerprint, as plain data."""
        sample = self.sample
        return {
            "workload": sample.workload.to_dict(),
            "cluster": sample.cluster.to_dict(),
            "environment": self.conditions.environment,
        }

    def row(self) -> Row:
        """The plain form."""
        sample, conditions = self.sample, self.conditions
        return {
            **{table: digest(document) for table, document in self.documents().items()},
            "plan": canonical(sample.plan.to_dict()),
            "kind": sample.kind,
            "seed": conditions.seed,
            "steps": list(sample.steps),
            "replayed": sample.replayed,
            "reference": sample.reference,
            "foreign_cores": conditions.foreign_cores,
            "load": conditions.load,
            "disturbed": conditions.disturbed,
            "measured_at": conditions.measured_at,
        }


def sample_key(cluster: str, workload: str, plan: str) -> str:
    """The name of a pair, from the fingerprints of cluster and workload and the plan's canonical JSON."""
    return digest([cluster, workload, digest_text(plan)])


def row_key(row: Row) -> str:
    """The name of a row's pair (see `PAIR`)."""
    return sample_key(row["cluster"], row["workload"], row["plan"])


def row_sample(row: Row, workload: Workload, cluster: ClusterSpec, where: str) -> Sample:
    """The sample of a row, its documents read already.

    Args:
        row: of the table of samples.
        workload: that it names.
        cluster: that it names.
        where: the row is, for errors.

    Raises:
        DocumentError: the plan is not one, or a time is none.
    """
    plan = SyncPlan.from_dict(parse_json(row["plan"], f"{where}: plan"), source=f"{where}: plan")
    steps, told = row_steps(row["steps"], where), (row["kind"], row["replayed"], row["environment"], row["reference"])
    try:
        return Sample(workload, cluster, plan, steps, *told)
    except ValueError as cause:
        raise DocumentError(f"{where}: {cause}") from None


def row_steps(steps: Iterable[float] | None, where: str) -> tuple[float, ...]:
    """The seconds of a row's steps.

    Args:
        steps: as the table has them.
        where: the row is, for errors.

    Raises:
        DocumentError: they are not those of a sample.
    """
    taken = () if steps is None else tuple(steps)
    try:
        check_steps(taken)
    except ValueError as cause:
        raise DocumentError(f"{where}: {cause}") from None
    return taken
