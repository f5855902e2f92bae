"""A world: a workload and a cluster as samplers know them, and a hidden truth that differs."""

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
    """Measures plans with a replay of the hidden truth.

    Args:
        pair: ``MODEL@CLUSTER``.
        settings: sizes, and how much true step times differ from predicted ones.

    Attributes:
        space: space of plans on the known cluster.
        known: known constants.
        hidden, links: true constants and true cluster.
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
        # The seeds let all pairs share hosts, and all pairs on a cluster share links, so that knowledge can transfer.
        self.hidden = _misjudge(self.known, Random(f"{settings.truth}"), settings.misjudged)
        self.links = _other_links(cluster, Random(f"{settings.truth} {cluster.name}"), settings.links)
        self._replay = Replay(workload, self.links, self.hidden)
        self._seconds: dict[str, float] = {}

    def seconds(self, plan: SyncPlan) -> float:
        """True seconds of a step."""
        name = signature(plan)
        if name not in self._seconds:
            # Plans are compiled for the known cluster, as in reality. Only the step time follows the true links.
            schedule = compile_plan(plan, self.space.workload, self.space.cluster)
            quirk = math.exp(Random(f"{self._secret} {name}").gauss(0.0, self._quirk))
            self._seconds[name] = self._replay.predict(schedule, self._detail).step_time * quirk
        return self._seconds[name]

    @property
    def best(self) -> float:
        """Least true seconds of the plans measured so far."""
        return min(self._seconds.values())

    def best_builder(self) -> float:
        """True seconds of the fastest builder's plan."""
        return min(self.seconds(self.space.plan(point)) for point in self.space.baselines())


class Oracle:
    """An estimator that knows the truth of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.constants = world.known

    def estimate(self, workload: Workload, cluster: ClusterSpec, plans: Sequence[SyncPlan]) -> Estimate:
        """True seconds of plans; only for the world's own workload and cluster."""
        seconds = numpy.array([self._world.seconds(plan) for plan in plans])
        return Estimate(seconds, numpy.zeros(len(plans)))

    def fit(self, samples: Sequence[Any]) -> None:
        """Does nothing: an oracle need not learn."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Oracle:
        """Returns itself: the oracle never changes, and its world is large."""
        return self


def _misjudge(constants: Constants, random: Random, deviation: float) -> Constants:
    """The constants, each multiplied by a random factor."""
    changes = {name: getattr(constants, name) * math.exp(random.gauss(0.0, deviation)) for name in _COSTS}
    return constants.model_copy(update=changes)


def _other_links(cluster: ClusterSpec, random: Random, deviation: float) -> ClusterSpec:
    """The cluster with the rates of each link multiplied by a random factor, the same in both directions."""
    data = cluster.to_dict()
    links = []
    for link in data.get("links", []):
        factor = math.exp(random.gauss(0.0, deviation))
        rates = {name: link[name] * factor for name in ("bandwidth", "reverse_bandwidth") if link.get(name)}
        links.append({**link, **rates})
    return ClusterSpec.from_dict({**data, "links": links})
