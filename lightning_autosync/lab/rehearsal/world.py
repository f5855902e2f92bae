"""A world: a workload and a cluster as they are known, and the truth, which is another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy

from lightning_autosync.cluster import ClusterSpec, resolve_cluster, synchronization_rate
from lightning_autosync.lab.rehearsal.settings import RehearsalSettings
from lightning_autosync.learned import Estimate
from lightning_autosync.measure.emulation.network import emulable
from lightning_autosync.measure.hosts import emulated_hosts
from lightning_autosync.plan import SyncPlan, compile_plan, signature
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute

_BATCH = {"batch_size": 8}
_COSTS = (
    "message_cost",
    "message_delay",
    "pair_cost",
    "collective_cost",
    "frame_cost",
    "gradient_cost",
    "host_cost",
    "sharing_loss",
    "copy_rate",
    "reduce_rate",
)


class World:
    """Measures plans by the true replay.

    Args:
        pair: ``MODEL@CLUSTER``.
        settings: sizes, and how far the truth is from what is known.

    Attributes:
        space: of plans, on the cluster as it is known.
        known: constants as they are known.
        hidden, links: constants and the cluster as they are.
    """

    def __init__(self, pair: str, settings: RehearsalSettings) -> None:
        model, _, name = pair.partition("@")
        cluster = emulable(resolve_cluster(name), settings.fastest_link)
        full = catalogue.build(model, **_BATCH)
        size = settings.bound * synchronization_rate(cluster) / full.bytes
        workload = with_compute(scaled(full, size), settings.bound * settings.compute)
        self.pair = pair
        self.space = PlanSpace(workload, cluster)
        self.known = emulated_hosts(cores=settings.cores)
        self._quirk = settings.quirk
        self._detail = settings.detail
        self._secret = f"{settings.truth} {pair}"
        # All pairs run on the same hosts, and all on a cluster have its links: what was learned of them serves others.
        self.hidden = _misjudge(self.known, Random(f"{settings.truth}"), settings.misjudged)
        self.links = _other_links(cluster, Random(f"{settings.truth} {cluster.name}"), settings.links)
        self._replay = Replay(workload, self.links, self.hidden)
        self._seconds: dict[str, float] = {}

    def seconds(self, plan: SyncPlan) -> float:
        """The true seconds of a step."""
        name = signature(plan)
        if name not in self._seconds:
            # Trees and shares follow the links as they are known; only what a step takes follows the true ones.
            schedule = compile_plan(plan, self.space.workload, self.space.cluster)
            quirk = math.exp(Random(f"{self._secret} {name}").gauss(0.0, self._quirk))
            self._seconds[name] = self._replay.predict(schedule, self._detail).step_time * quirk
        return self._seconds[name]

    @property
    def best(self) -> float:
        """The least seconds that any plan measured here takes."""
        return min(self._seconds.values())

    def best_builder(self) -> float:
        """Seconds of the fastest builder's plan."""
        return min(self.seconds(self.space.plan(point)) for point in self.space.baselines())


class Oracle:
    """An estimator that knows the truth of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.constants = world.known

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """The truth, for the world's own workload and cluster."""
        seconds = numpy.array([self._world.seconds(plan) for plan in plans])
        return Estimate(seconds, numpy.zeros(len(plans)))

    def fit(self, samples: Sequence[Any]) -> None:
        """Nothing is left to learn."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Oracle:
        """Itself: it does not change, and its world is large."""
        return self


def _misjudge(constants: Constants, random: Random, deviation: float) -> Constants:
    """Constants, each off by a factor of its own."""
    changes = {name: getattr(constants, name) * math.exp(random.gauss(0.0, deviation)) for name in _COSTS}
    return constants.model_copy(update=changes)


def _other_links(cluster: ClusterSpec, random: Random, deviation: float) -> ClusterSpec:
    """The cluster with rates that are each off by a factor of its own, each direction by the same."""
    data = cluster.to_dict()
    links = []
    for link in data.get("links", []):
        factor = math.exp(random.gauss(0.0, deviation))
        rates = {name: link[name] * factor for name in ("bandwidth", "reverse_bandwidth") if link.get(name)}
        links.append({**link, **rates})
    return ClusterSpec.from_dict({**data, "links": links})
