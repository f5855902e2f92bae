"""Settings of a validation: the number of cases, their clusters and models, and how long to measure each."""

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
        seed: seed of the draw; the same seed draws the same cases.
        cases: number of cases, spread evenly over all pairs of a cluster and a family.
        clusters: names of shipped clusters, or paths.
        families: models of the catalogue, scaled down.
        fastest_link: bytes/s of the fastest link, to which all links of a faster cluster are slowed down in proportion.
        bound: least and greatest seconds of the fastest synchronization of a drawn workload.
        most_cores: maximum share of a step in which the shared cores are busy with synchronization, by the replay with
            default constants. A plan that needs more is drawn again. In a real cluster every node has its own cores.
            Here all ranks share a few, and above this share a step would depend mainly on the kernel's scheduler.
        cores: number of shared cores for ``most_cores``. It is fixed, so that a seed draws the same cases on every
            machine.
        warm_up: number of steps of a case that are not counted.
        seconds: approximate seconds of all counted steps of a case; at least three steps are counted.
        scheduling: the kernel's scheduling policy for the workers.
        constants: file of the hosts' constants, from a probe. None probes the hosts between measurements, since the
            speed of a shared machine varies.
        probe_every: number of cases between two such probes.
        measurements: file of measurements, one per line, to read and to continue; None starts one in the run directory.
        timeout: maximum seconds of one case.
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
