"""Samples: measured plans, the conditions of their measurements, and their rows."""

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
from lightning_autosync.step_times import typical_step
from lightning_autosync.workload import Workload

_TIMES = f"allowed: {LEAST:g} to {LONGEST:g} seconds"


@dataclass(frozen=True)
class Sample:
    """The step times of a plan for a workload on a cluster.

    Attributes:
        workload: the synchronized workload.
        cluster: the emulated or real machines.
        plan: the measured plan.
        steps: seconds of each measured step, the mean of ranks; at least one. Samples that were collected before
            2026-11-28, such as the shipped ones, have those of the slowest rank.
        kind: origin of the plan: the name of a builder, ``drawn``, ``evolved`` ...
        replayed: seconds of a step as predicted by the replay at the time of the measurement; None if not predicted.
        environment: fingerprint of the environment of the measurement; None if it is the same for all samples.
        reference: seconds of a step of the reference plan for this workload and cluster, which was measured just before
            this plan's batch. All samples of a batch share it. None if not measured.

    Raises:
        ValueError: ``steps``, ``replayed`` or ``reference`` has an invalid time.
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
        """Seconds of a typical step."""
        return typical_step(self.steps)

    @cached_property
    def noise(self) -> float:
        """Relative standard error of `seconds`, from the median absolute deviation of the steps; 0 for one step."""
        return step_noise(self.steps)


def is_time(seconds: float) -> bool:
    """Whether a number is a valid step time in seconds."""
    return LEAST <= seconds <= LONGEST


def check_steps(steps: Sequence[float | None]) -> None:
    """Check the seconds of measured steps: at least one, each finite and above 0.

    Raises:
        ValueError: there are no steps, or a time is invalid; the message names the first one.
    """
    if not steps:
        raise ValueError("steps: empty; a sample needs at least one")
    for number, seconds in enumerate(steps):
        if seconds is None or not is_time(seconds):
            raise ValueError(f"steps[{number}]: {seconds} is not a time; {_TIMES}")


def step_noise(steps: Sequence[float]) -> float:
    """The noise of a sample with these steps; see `Sample.noise`."""
    if len(steps) < 2:
        return 0.0
    median = statistics.median(steps)
    deviation = statistics.median(abs(step - median) for step in steps)
    # For normal values: standard deviation by median absolute deviation, and standard error of median by that of mean.
    return 1.4826 * 1.2533 * deviation / len(steps) ** 0.5 / median


Row = dict[str, Any]
"""An entry as plain data with the columns of `COLUMNS`: documents as fingerprints, the plan as canonical JSON."""

COLUMNS = {
    "workload": "fingerprint of the workload",
    "cluster": "fingerprint of the cluster",
    "environment": "fingerprint of what it ran on: versions, kernel, processor, cores, TCP algorithm",
    "plan": "the plan as canonical JSON (keys sorted, no blanks)",
    "kind": "how the plan came about: reference, buckets, the name of a builder, free, drawn or evolved",
    "seed": "of the draw",
    "steps": "seconds of each step, in order; warm-up left out: the mean of the ranks, or those of the slowest rank in "
    "samples that were collected before 2026-11-28, such as the shipped ones",
    "replayed": "seconds of a step as the replay priced it then; null if it did not",
    "reference": "seconds of a step of the pair's reference plan, measured again just before; null if it was not",
    "foreign_cores": "cores that other processes or virtual machines kept busy meanwhile; null where unknown",
    "load": "load average of the last minute; null where unknown",
    "disturbed": "whether that was more than the collection allowed; left out of training by default",
    "measured_at": "seconds since 1970, UTC",
}
"""The columns of samples and their meanings."""
PAIR = ("workload", "cluster", "plan")
"""The columns that identify a pair: rows that agree in them measured the same thing."""
DOCUMENTS = ("workload", "cluster", "environment")
"""The columns that contain fingerprints of documents; their names are also the kinds of documents."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of a measurement.

    Attributes:
        environment: plain data about the machine and the software, which is the same for a whole run.
        seed: seed of the random plans.
        foreign_cores: number of cores that other processes kept busy meanwhile; None if unknown.
        load: load average of the last minute; None if unknown.
        disturbed: whether other processes kept more cores busy than allowed.
        measured_at: seconds since 1970, UTC.
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
        """The documents to which the row refers by fingerprint, as plain data by kind."""
        sample = self.sample
        return {
            "workload": sample.workload.to_dict(),
            "cluster": sample.cluster.to_dict(),
            "environment": self.conditions.environment,
        }

    def row(self) -> Row:
        """The entry as a row, with plain data for each of `COLUMNS`."""
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
    """The key of a pair, from the fingerprints of cluster and workload and the plan's canonical JSON."""
    return digest([cluster, workload, digest_text(plan)])


def row_key(row: Row) -> str:
    """The key of a row's pair (see `PAIR`)."""
    return sample_key(row["cluster"], row["workload"], row["plan"])


def row_sample(row: Row, workload: Workload, cluster: ClusterSpec, where: str) -> Sample:
    """The sample of a row, with its documents.

    Args:
        where: source of the row, for errors.

    Raises:
        DocumentError: the plan or a time is invalid.
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
        steps: the steps in the table.
        where: source of the row, for errors.

    Raises:
        DocumentError: there are no steps, or a time is invalid.
    """
    taken = () if steps is None else tuple(steps)
    try:
        check_steps(taken)
    except ValueError as cause:
        raise DocumentError(f"{where}: {cause}") from None
    return taken
