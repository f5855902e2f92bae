"""Samples: measured plans, the conditions of their measurement, and their rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import LEAST, LONGEST, canonical, digest, digest_text, parse_json
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import SyncPlan
from lightning_autosync.workload import Workload

_TIMES = f"it must be finite and above 0 seconds, from {LEAST:g} to {LONGEST:g}"


@dataclass(frozen=True)
class Sample:
    """The step times of a plan for a workload on a cluster.

    Attributes:
        workload: what was synchronized.
        cluster: the machines, as emulated or real.
        plan: how.
        steps: seconds of each measured step, of the slowest rank; at least one.
        kind: how the plan came about: the name of a builder, ``drawn``, ``evolved`` ...
        replayed: seconds of a step as the replay prices it with the constants of the time; None if it did not.
        environment: fingerprint of what it was measured on; None where that is the same for all.
        reference: seconds of a step of the pair's reference plan, measured again just before the batch of plans that
            this one came in, whose samples have it in common; None if it was not measured.

    Raises:
        ValueError: `check_steps` refuses the steps, or the reference is no time either.
    """

    workload: Workload
    cluster: ClusterSpec
    plan: SyncPlan
    steps: tuple[float, ...]
    kind: str = "drawn"
    replayed: float | None = None
    environment: str | None = field(default=None, compare=False)
    reference: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_steps(self.steps)
        for name, seconds in (("replayed", self.replayed), ("reference", self.reference)):
            if seconds is not None and not is_time(seconds):
                raise ValueError(f"{name}: {seconds} is not a time; {_TIMES}")

    @cached_property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @cached_property
    def noise(self) -> float:
        """Standard error of `seconds` over `seconds`, from the median absolute deviation; 0 with a single step."""
        return step_noise(self.steps)


def is_time(seconds: float) -> bool:
    """Whether a number of seconds can be that of a step."""
    return LEAST <= seconds <= LONGEST


def check_steps(steps: Sequence[float | None]) -> None:
    """Check the seconds of measured steps: at least one, each finite and above 0.

    Raises:
        ValueError: the first thing wrong.
    """
    if not steps:
        raise ValueError("steps: none; a sample has at least one")
    for number, seconds in enumerate(steps):
        if seconds is None or not is_time(seconds):
            raise ValueError(f"steps[{number}]: {seconds} is not a time; {_TIMES}")


def step_noise(steps: Sequence[float]) -> float:
    """The noise of a sample of those steps (see `Sample.noise`)."""
    if len(steps) < 2:
        return 0.0
    median = statistics.median(steps)
    deviation = statistics.median(abs(step - median) for step in steps)
    return 1.4826 * 1.2533 * deviation / len(steps) ** 0.5 / median


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
        """The row: plain data for each of `COLUMNS`."""
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
