"""Settings of a collection (the pairs, their workloads, clusters and plans, how to measure them), and its result."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Configuration, Index, Record, Result

Range = tuple[PositiveFloat, PositiveFloat]


class Mixture(Record):
    """Relative numbers of plans of each kind.

    Attributes:
        buckets: DDP's method with buckets of a random size.
        built: builders' plans, first with default arguments, then with random ones.
        free: plans in which every aspect of every message is drawn independently.
        drawn: uniform points of the `PlanSpace`.
        evolved: points of the `PlanSpace` after selection, mutation and crossover, with the replay as price.
    """

    buckets: NonNegativeFloat = 1.0
    built: NonNegativeFloat = 3.0
    free: NonNegativeFloat = 2.0
    drawn: NonNegativeFloat = 2.0
    evolved: NonNegativeFloat = 3.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not sum(share for _, share in self) > 0:
            raise ValueError("mixture: at least one kind must be above zero")
        return self


class CollectionSettings(Configuration):
    """One collection.

    Attributes:
        dataset: folder of the dataset; pairs with an undisturbed measurement are not measured again.
        seed: seed of the draw; the same seed draws the same workloads and plans.
        pairs: number of plans, spread evenly over all combinations of a workload and a cluster.
        clusters: names of shipped clusters, paths, or clusters in short form, such as ``{name: a, star: {...}}``.
        families: models of the catalogue, also with arguments, such as ``{family: bert_base, layers: 3}``; ``name``
            distinguishes two of a family.
        variants: number of workloads of each family, with different sizes and shares of computation.
        lightest: share of all bytes below which a dense variable is left out of a workload. Each gradient costs time on
            the cores that all ranks share, but steps should depend on links.
        rate: bytes/s of synchronization to which all links of a cluster are scaled in proportion ...
        fastest_link: ... unless a link would exceed this rate in bytes/s.
        bytes: least and greatest bytes of a workload's gradients, drawn log-uniformly.
        ratio: least and greatest ratio of a workload's computation to its fastest synchronization at ``rate``, drawn
            log-uniformly.
        mixture: how plans are drawn.
        slowest: ratio of a plan's predicted time to the best prediction for its workload and cluster above which the
            plan is replaced by another.
        messages: maximum number of messages of a plan.
        passes: number of visits to every combination, so that an interrupted run has measured a part of each.
        batch: number of plans in one call to the workers. Before each, the reference plan (DDP's default) is measured
            again.
        warm_up: number of steps of a plan that are not counted.
        seconds: approximate seconds of all counted steps of a plan, within ``steps``. If a step takes far longer, only
            one is counted.
        steps: least and greatest number of counted steps of a plan.
        quiet: number of cores that other processes may keep busy. Samples beside more load are marked as disturbed, and
            the next run measures them again.
        failures: number of plans that may fail before the collection stops.
        scheduling: the kernel's scheduling policy for the workers.
        constants: file of the hosts' constants, from a probe; None uses the defaults with ``cores``.
        cores: number of cores that all ranks share; None uses this machine's. Only without ``constants``.
        timeout: maximum seconds of one plan.
    """

    dataset: str
    seed: Index = 0
    pairs: PositiveInt = 10_080
    clusters: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1)]
    families: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1)]
    variants: PositiveInt = 2
    lightest: Annotated[float, Field(ge=0, lt=1)] = 0.002
    rate: PositiveFloat = 12.5e6
    fastest_link: PositiveFloat = 100e6
    bytes: Range = (0.25e6, 0.75e6)
    ratio: Range = (0.2, 2.0)
    mixture: Mixture = Mixture()
    slowest: Annotated[float, Field(gt=1)] = 5.0
    messages: PositiveInt = 200
    passes: PositiveInt = 3
    batch: PositiveInt = 12
    warm_up: PositiveInt = 1
    seconds: PositiveFloat = 0.2
    steps: tuple[PositiveInt, PositiveInt] = (3, 5)
    quiet: PositiveFloat = 0.3
    failures: Index = 10
    scheduling: Literal["none", "batch"] = "batch"
    constants: str | None = None
    cores: PositiveFloat | None = None
    timeout: PositiveFloat = 30.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("bytes", "ratio", "steps"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name}: least ({least}) is above most ({most})")
        if self.constants is not None and self.cores is not None:
            raise ValueError("cores: the file of constants has the number of cores; leave out cores or constants")
        return self


class CollectionResult(Result):
    """``autosync-collection/1``: what one run of ``autosync collect`` did.

    Attributes:
        dataset: absolute path of the dataset.
        pairs: number of pairs in the dataset after the run.
        seconds: seconds of the run.
        measured, disturbed, failed, drawing, measuring, stepping: as in the collector's `Progress`.
    """

    FORMAT: ClassVar[str] = "autosync-collection/1"

    settings: CollectionSettings
    dataset: str
    pairs: Index
    seconds: float
    measured: Index
    disturbed: Index
    failed: tuple[dict[str, str], ...]
    drawing: float
    measuring: float
    stepping: float

    def figures(self) -> dict[str, str]:
        counts = {"pairs": self.pairs, "measured": self.measured, "disturbed": self.disturbed}
        return {name: str(count) for name, count in {**counts, "failed": len(self.failed)}.items()}
