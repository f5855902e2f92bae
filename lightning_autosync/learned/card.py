"""`SimulatorCard`: what a simulator was fitted to, its accuracy on what it did not see, and the limits of its jobs."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field, model_validator

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.documents import Count, Document, Duration, Index, Record
from lightning_autosync.errors import DocumentError
from lightning_autosync.learned.dataset.sample import Sample
from lightning_autosync.learned.simulator import SimulatorError
from lightning_autosync.workload import Workload

CARD = "card.json"
"""File of the card, beside the simulator's header."""
_VERSIONS = ("lightning-autosync", "torch", "numpy", "dgl")
_ROUNDING = 1 + 1e-6
"""Factor beyond a limit that counts as rounding."""
_Name = Annotated[str, Field(min_length=1, max_length=64)]
_Share = Annotated[float, Field(ge=0, le=1)]


class Range(Record):
    """The smallest and the largest value of a number."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        found = list(values)
        return cls(least=min(found), most=max(found))

    def has(self, value: float) -> bool:
        """Whether the value is between both, up to rounding."""
        return self.least <= value * _ROUNDING and value <= self.most * _ROUNDING


class _Property(NamedTuple):
    """A property of a job: the field of `Limits`, its name in messages, its unit, and the size of this unit."""

    field: str
    name: str
    unit: str
    size: float


_PROPERTIES = (
    _Property("ranks", "number of ranks", "", 1),
    _Property("bytes", "size of the gradients", " MB", 1e6),
    _Property("slowest_link", "rate of the slowest link", " Mbit/s", 1e6 / 8),
    _Property("fastest_link", "rate of the fastest link", " Mbit/s", 1e6 / 8),
    _Property("latency", "largest latency of a link", " ms", 1e-3),
)


class Limits(Record):
    """The jobs of a dataset: the range of each property.

    Attributes:
        ranks: number of ranks.
        bytes: bytes of the gradients.
        slowest_link, fastest_link: bytes/s of the slowest and of the fastest link of a cluster.
        latency: seconds of the largest latency of a link of a cluster.
    """

    ranks: Range
    bytes: Range
    slowest_link: Range
    fastest_link: Range
    latency: Range

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Limits:
        """The limits of the jobs of at least one sample."""
        jobs = {(id(one.workload), id(one.cluster)): (one.workload, one.cluster) for one in samples}
        found = [_properties(*job) for job in jobs.values()]
        return cls(**{one.field: Range.of(job[one.field] for job in found) for one in _PROPERTIES})

    def exceeded(self, workload: Workload, cluster: ClusterSpec) -> str | None:
        """The first property of a job that is out of its range, with the range; None if all are within.

        Raises:
            ClusterError: the rates of the cluster are unknown.
        """
        found = _properties(workload, cluster)
        for one in _PROPERTIES:
            limits, value = getattr(self, one.field), found[one.field]
            if not limits.has(value):
                least, most = (f"{end / one.size:.4g}" for end in (limits.least, limits.most))
                seen = least if least == most else f"{least} to {most}"
                return f"{one.name} is {value / one.size:.4g}{one.unit}, but was {seen}{one.unit} in its dataset"
        return None


def _properties(workload: Workload, cluster: ClusterSpec) -> Mapping[str, float]:
    graph = LinkGraph(cluster)
    links = graph.capacities[: 2 * len(cluster.links)] if cluster.links else graph.capacities
    return {
        "ranks": cluster.world_size,
        "bytes": workload.bytes,
        "slowest_link": float(min(links, default=0.0)),
        "fastest_link": float(max(links, default=0.0)),
        "latency": max((channel.latency for channel in graph.channels), default=0.0),
    }


class HeldOut(Record):
    """Models and clusters that a simulator does not see. Its accuracy is measured on pairs of both.

    Attributes:
        models: families of models, such as ``bert`` for bert_base and bert_large.
        clusters: names of clusters.
    """

    models: tuple[_Name, ...] = ()
    clusters: tuple[_Name, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.models)

    @model_validator(mode="after")
    def _check(self) -> HeldOut:
        if bool(self.models) != bool(self.clusters):
            raise ValueError("give models and clusters, or neither")
        return self


class PredictionAccuracy(Record):
    """The accuracy of predictions on pairs of a workload and a cluster, each with several measured plans.

    Attributes:
        ranking: share of pairs of plans for the same workload and cluster that are predicted in the right order; plans
            that differ by less than noise are left out.
        tau: Kendall's tau-b, the mean over workloads and clusters.
        median_error: median relative error of a step time.
        regret: how much slower the plan that is predicted to be the fastest is than the fastest plan, as a share of its
            step; the mean over workloads and clusters.
        largest_regret: the largest of these.
    """

    ranking: _Share
    tau: Annotated[float, Field(ge=-1, le=1)]
    median_error: Duration
    regret: Duration
    largest_regret: Duration


class HeldOutAccuracy(Record):
    """The accuracy of a simulator, and of the replay alone, on what the simulator did not see.

    Attributes:
        pairs: number of pairs of a workload and a cluster.
        plans: number of measured plans.
        simulator: accuracy of the simulator.
        replay: accuracy of the replay alone.
    """

    pairs: Count
    plans: Count
    simulator: PredictionAccuracy
    replay: PredictionAccuracy


LONGEST_COMMAND = 2**17
"""Most characters of a command, about as many as Linux takes in one argument."""


class SimulatorCard(Document):
    """The card of a fitted simulator, in ``card.json`` beside its header.

    Attributes:
        command: the command that fits this simulator again.
        dataset: digest of the checksums of the dataset's parts.
        samples: number of samples that it learned from.
        clusters: names of their clusters.
        models: families of their models.
        limits: the ranges of properties of their jobs, and of the jobs in ``held_out`` on which it was judged.
        held_out: models and clusters that it did not see.
        accuracy: its accuracy on these; None if it saw all.
        environments: fingerprints of the environments in which the samples were measured.
        versions: versions of the packages that fitted it.
        fitted_on: day of the fit, as in ISO 8601.
    """

    FORMAT: ClassVar[str] = "autosync-simulator-card/1"
    ERROR: ClassVar[type[DocumentError]] = SimulatorError

    command: Annotated[str, Field(max_length=LONGEST_COMMAND)]
    dataset: Annotated[str, Field(max_length=64)]
    samples: Index
    clusters: tuple[str, ...]
    models: tuple[str, ...]
    limits: Limits
    held_out: HeldOut = HeldOut()
    accuracy: HeldOutAccuracy | None = None
    environments: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    fitted_on: Annotated[str, Field(max_length=32)] = ""


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that fit simulators; without those that are not installed."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
