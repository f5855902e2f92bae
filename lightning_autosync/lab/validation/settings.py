"""Settings of a validation: how many cases to draw, of which clusters and models, and how long to measure each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lightning_autosync.documents import Configuration, Index

CLUSTERS = (
    "fat_node_star",
    "fat_node_star_8",
    "four_equal",
    "ring_of_four",
    "two_nodes_of_four",
    "two_racks_2to1",
    "two_racks_8to1",
    "two_sites_wan",
)
"""Shipped clusters of four to eight ranks."""
FAMILIES = ("vgg16", "resnet50", "densenet121", "bert_base", "ncf", "gpt")
"""Models of the catalogue, one of each family."""


class ValidationSettings(Configuration):
    """One validation run.

    Attributes:
        seed: of the draw; the same seed draws the same cases.
        cases: how many cases there are, dealt evenly to all pairs of a cluster and a family.
        clusters: names of shipped clusters or paths.
        families: models of the catalogue, scaled down.
        fastest_link: bytes/s to which a cluster is slowed down, all of its links alike, if one of them is faster.
        bound: seconds, least and most, that the least synchronization of a drawn workload takes.
        most_cores: share of a step, by the replay with its default constants, in which the shared cores may be busy for
            synchronization; a plan that asks for more is drawn anew. The ranks of a cluster have cores of their own;
            here all share a few, and beyond that share a step would tell of their scheduler alone.
        cores: how many cores that share is of. A number, so that a seed draws the same cases on every machine.
        warm_up: steps of a case that are not counted.
        seconds: how long the steps of a case may take together, as predicted; at least three are measured.
        scheduling: the kernel's policy for the workers.
        constants: file of the hosts' constants, from a probe; None probes the hosts among the measurements, for a
            machine that has neighbours is not always equally fast.
        probe_every: cases from one such probe to the next.
        measurements: file of measurements, one a line, to read and to go on with; None starts one in the run directory.
        timeout: seconds that one case may take.
    """

    seed: Index = 0
    cases: PositiveInt = 336
    clusters: Annotated[tuple[str, ...], Field(min_length=1)] = CLUSTERS
    families: Annotated[tuple[str, ...], Field(min_length=1)] = FAMILIES
    fastest_link: PositiveFloat = 50e6
    bound: tuple[PositiveFloat, PositiveFloat] = (0.05, 0.3)
    most_cores: PositiveFloat = 0.3
    cores: PositiveInt = 2
    warm_up: PositiveInt = 2
    seconds: PositiveFloat = 1.2
    scheduling: Literal["none", "batch"] = "batch"
    constants: str | None = None
    probe_every: PositiveInt = 14
    measurements: str | None = None
    timeout: PositiveFloat = 120.0
