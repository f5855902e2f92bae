"""Settings of a rehearsal: the pairs, the samplers, and how far the hidden truth deviates from what samplers know."""

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
        samplers: samplers to compare. ``transfer`` is ``autosync`` that starts from the study of ``source`` instead of
            the builders' plans. ``random``, ``tpe`` and ``gp`` are Optuna's on the same space. ``horovod`` is a
            Gaussian process over the bucket size. ``oracle`` is autosync with the truth as its simulator, and shows
            what can be found.
        seeds: number of runs of each sampler on each pair.
        budget: number of trials of a run, builders' plans included.
        batch: number of trials that are proposed at once.
        noise: standard deviation of the logarithm of a measured time.
        misjudged: standard deviation of the logarithm of true over known for each host constant. All pairs have the
            same hosts.
        links: standard deviation of the logarithm of true over known for each link's rate.
        quirk: standard deviation of the logarithm of a plan's time that no constant explains.
        truth: seed of these deviations, which are the same for all runs on a pair.
        detail: detail of the true replay. ``fluid`` is tens of times faster than the replay that the sampler uses, and
            differs from it by some percent per plan.
        bound: seconds of the fastest possible synchronization of a workload.
        compute: seconds of forward and backward, in units of ``bound``.
        fastest_link: bytes/s of the fastest link, to which faster clusters are slowed down.
        cores: number of cores that all ranks share.
        source: pair whose study ``transfer`` starts from, none of ``pairs``; None uses the previous pair in ``pairs``.
        source_budget: number of trials of that study.
        options: sizes that `AutoSyncSampler` accepts as arguments, such as ``population``.
        runs: file of finished runs, one per line, to read and to continue. Its settings must be the same except for
            ``pairs``, ``samplers`` and ``seeds``. None starts a file in the run directory.
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
            raise ValueError("source: missing; with a single pair, 'transfer' needs the pair to start from")
        transfers = self.source is not None or "transfer" in self.samplers
        itself = next((pair for pair in self.pairs if transfers and self.source_of(pair) == pair), None)
        if itself is not None:
            raise ValueError(f"source: '{itself}' would start from its own study; give a pair that is not in pairs")
        try:
            SamplerSizes.check(self.options)
        except ValueError as error:
            raise ValueError(f"options: {error}") from None
        return self

    def source_of(self, pair: str) -> str:
        """The pair from whose study ``transfer`` starts."""
        return self.source or self.pairs[self.pairs.index(pair) - 1]
