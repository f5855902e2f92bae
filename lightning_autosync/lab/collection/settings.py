"""Settings of a collection: how many pairs, of which workloads, clusters and plans, and how to measure them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Configuration, Index, Record

Range = tuple[PositiveFloat, PositiveFloat]


class Mixture(Record):
    """How many plans of each kind there are for each of the others.

    Attributes:
        buckets: DDP's way, buckets of a random size.
        built: builders, first with their defaults, then with random arguments.
        free: every aspect of every message drawn by itself.
        drawn: uniform points of the `PlanSpace`.
        evolved: its points after selection, mutation and crossover with the replay as price.
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
        dataset: folder of the dataset; what it has undisturbed is not measured again.
        seed: of the draw; the same seed draws the same workloads and plans.
        pairs: how many plans there are, dealt evenly to all combinations of a workload and a cluster.
        clusters: names of shipped clusters, paths, or clusters in short form, as ``{name: a, star: {...}}``.
        families: models of the catalogue, or with arguments, as ``{family: bert_base, layers: 3}``; ``name``
            tells two of a family apart.
        variants: workloads of each family, of different size and share of computation.
        lightest: a dense variable with less than this share of all bytes is left out of a workload: each gradient costs
            the cores that all ranks share, and steps should show links.
        rate: bytes/s of synchronization to which a cluster is scaled, all of its links alike ...
        fastest_link: ... unless a link would carry more bytes/s than this.
        bytes: of a workload's gradients, least and most; drawn evenly in the logarithm.
        ratio: computation of a workload over its least synchronization at ``rate``, least and most; drawn likewise.
        mixture: how plans are drawn.
        slowest: a plan that the replay prices at more than this many times the best price of its workload and cluster
            is not measured, and another one drawn.
        messages: a plan of more messages than this is not measured either.
        passes: how often every combination is visited, so that an early end leaves part of each.
        batch: plans of one order to the workers; before each, the reference plan (DDP's default) is measured again.
        warm_up: steps of a plan that are not counted.
        seconds: how long the counted steps of a plan take together, within ``steps``; of one that takes far longer, one
            step is counted.
        steps: of a plan, least and most.
        quiet: cores that others may keep busy; samples beside more are marked as disturbed, and the next run measures
            them again.
        failures: plans that may fail before the collection gives up.
        scheduling: the kernel's policy for the workers.
        constants: file of the hosts' constants, from a probe; None takes the defaults on ``cores``.
        cores: cores that all ranks share; None takes those of this machine. Only without ``constants``.
        timeout: seconds that one plan may take.
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
        return self
