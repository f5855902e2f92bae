"""What a rehearsal is told: the pairs, the samplers, and how far the hidden truth is from what they know."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from lightning_autosync.documents import Configuration, Index
from lightning_autosync.replay.replay import Detail
from lightning_autosync.search.sampler.proposer import SamplerSizes

Name = Literal["autosync", "transfer", "random", "tpe", "gp", "horovod", "oracle"]

PAIRS = (
    "vgg16@fat_node_star_8",
    "densenet121@two_racks_2to1",
    "bert_base@two_nodes_of_four",
    "ncf@two_racks_8to1",
    "resnet50@ring_of_four",
    "gpt@two_sites_wan",
)


class RehearsalSettings(Configuration):
    """One rehearsal.

    Attributes:
        pairs: workloads of the catalogue and clusters, as ``MODEL@CLUSTER``.
        samplers: ``autosync``; ``transfer``, which is the same with the study of ``source`` to start from and without
            the builders' plans in front; ``random``, ``tpe``, ``gp`` of Optuna on the same space; ``horovod``, a
            Gaussian process over the size of buckets; ``oracle``, autosync with the truth for a simulator, which shows
            what there is to be found.
        seeds: runs of each sampler on each pair.
        budget: trials of a run, the builders' plans included.
        batch: trials that are proposed at once.
        noise: standard deviation of the logarithm of a measured time.
        misjudged: of the logarithm of each of the hosts' constants, true over known; the hosts are those of all pairs.
        links: of the logarithm of each link's rate, true over known.
        quirk: of the logarithm of a plan's time, by what no constant explains.
        truth: seed of these errors; they are the same for all runs on a pair.
        detail: of the true replay; ``fluid`` is tens of times faster than the replay that the sampler asks, and differs
            from it by some per cent a plan.
        bound: seconds that the least synchronization of a workload takes.
        compute: forward and backward in units of ``bound``.
        fastest_link: bytes/s to which faster clusters are slowed down.
        cores: that all ranks share.
        source: pair whose study ``transfer`` starts from, none of ``pairs``; None takes the pair before in ``pairs``.
        source_budget: trials of that study.
        options: sizes that `AutoSyncSampler` takes as arguments, such as ``population``.
        runs: file of finished runs, one a line, to read and to go on with; it must be of the same settings but for
            ``pairs``, ``samplers`` and ``seeds``. None starts one in the run directory.
    """

    pairs: Annotated[tuple[str, ...], Field(min_length=1)] = PAIRS
    samplers: Annotated[tuple[Name, ...], Field(min_length=1)] = ("autosync", "transfer", "random", "tpe", "horovod")
    seeds: PositiveInt = 5
    budget: PositiveInt = 200
    batch: PositiveInt = 4
    noise: NonNegativeFloat = 0.02
    misjudged: NonNegativeFloat = 0.5
    links: NonNegativeFloat = 0.1
    quirk: NonNegativeFloat = 0.03
    truth: Index = 0
    detail: Detail = "auto"
    bound: PositiveFloat = 0.08
    compute: PositiveFloat = 0.5
    fastest_link: PositiveFloat = 50e6
    cores: PositiveFloat = 2.0
    source: str | None = None
    source_budget: PositiveInt = 100
    options: dict[str, Any] = Field(default_factory=dict)
    runs: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pair in (*self.pairs, *([self.source] if self.source else [])):
            if pair.count("@") != 1:
                raise ValueError(f"pairs: expected MODEL@CLUSTER, got {pair!r}")
        if "transfer" in self.samplers and self.source is None and len(self.pairs) == 1:
            raise ValueError("source: missing; with one pair 'transfer' needs to be told where from")
        itself = next((pair for pair in self.pairs if self._transfers and self.source_of(pair) == pair), None)
        if itself is not None:
            raise ValueError(f"source: '{itself}' would start from its own study; name a pair that is none of pairs")
        try:
            SamplerSizes.check(self.options)
        except ValueError as error:
            raise ValueError(f"options: {error}") from None
        return self

    @property
    def _transfers(self) -> bool:
        """Whether any run would start from a source, if it were of ``transfer``."""
        return self.source is not None or "transfer" in self.samplers

    def source_of(self, pair: str) -> str:
        """The pair from whose study ``transfer`` starts."""
        return self.source or self.pairs[self.pairs.index(pair) - 1]
