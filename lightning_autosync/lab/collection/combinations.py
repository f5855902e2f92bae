"""What is measured: every workload on every cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, synchronization_rate
from lightning_autosync.errors import DocumentError, WorkloadError
from lightning_autosync.lab.collection.settings import Range, Settings
from lightning_autosync.measure.emulation.emulated_clusters import emulable
from lightning_autosync.workload import Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute

_BATCH = {"batch_size": 8}


@dataclass(frozen=True)
class Combination:
    """A workload on a cluster, and how many plans are drawn for it."""

    workload: Workload
    cluster: ClusterSpec
    plans: int

    @property
    def name(self) -> str:
        """Workload and cluster, for people."""
        return f"{self.workload.name} on {self.cluster.name}"


def draw_combinations(settings: Settings) -> list[Combination]:
    """Every workload on every cluster, cluster by cluster.

    Raises:
        ClusterError: there is no such cluster.
        WorkloadError: there is no such model.
        DocumentError: two clusters or two families have the same name.
    """
    clusters = [scaled_cluster(name, settings.rate, settings.fastest_link) for name in settings.clusters]
    workloads = [
        draw_workload(settings, model, variant) for model in settings.families for variant in range(settings.variants)
    ]
    _check_names("clusters", [cluster.name for cluster in clusters])
    _check_names("families", [workload.name for workload in workloads])
    places = list(product(clusters, workloads))
    return [
        Combination(workload, cluster, settings.pairs // len(places) + (number < settings.pairs % len(places)))
        for number, (cluster, workload) in enumerate(places)
    ]


def scaled_cluster(cluster: str | dict[str, Any], rate: float, fastest: float) -> ClusterSpec:
    """A cluster brought to a rate of synchronization, or as near to it as its fastest link may; without latency.

    So that a workload takes a like time on each; what clusters differ in is the shape.
    """
    named = cluster if isinstance(cluster, str) else ClusterSpec.from_dict({"format": ClusterSpec.FORMAT, **cluster})
    shape = emulable(resolve_cluster(named), math.inf)
    if not shape.links:
        return shape
    return emulable(shape.scaled(rate / synchronization_rate(shape)), fastest)


def draw_workload(settings: Settings, model: str | dict[str, Any], variant: int) -> Workload:
    """A model of the catalogue in another size and with another share of computation."""
    arguments = {"family": model} if isinstance(model, str) else dict(model)
    family = arguments.pop("family", None)
    if not isinstance(family, str):
        raise WorkloadError(f"families: {model}: family: missing; it is one of {', '.join(catalogue.names())}")
    name = f"{arguments.pop('name', family)}-{variant}"
    random = Random(f"{settings.seed} {name}")
    size, ratio = _draw(random, settings.bytes), _draw(random, settings.ratio)
    full = without_light(catalogue.build(family, **_BATCH | arguments), settings.lightest)
    workload = with_compute(scaled(full, size / full.bytes), ratio * size / settings.rate)
    return workload.model_copy(update={"name": name})


def without_light(workload: Workload, share: float) -> Workload:
    """The workload without its dense variables of less than a share of all bytes."""
    least = share * workload.bytes
    kept = [variable for variable in workload.variables if variable.kind != "dense" or variable.bytes >= least]
    return workload.model_copy(update={"variables": tuple(kept)})


def _draw(random: Random, limits: Range) -> float:
    """Between both limits, evenly in the logarithm."""
    least, most = limits
    return math.exp(random.uniform(math.log(least), math.log(most)))


def _check_names(field: str, names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DocumentError(f"{field}: '{name}' is there {count} times; give each a 'name' of its own")
