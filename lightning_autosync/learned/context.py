"""`Context`: the features of a workload on a cluster, which do not depend on a plan."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property

import numpy
from numpy.typing import NDArray

from lightning_autosync.cluster import ClusterSpec, LinkGraph, server_shares
from lightning_autosync.replay.bound import changed_bytes, step_bound
from lightning_autosync.replay.compute import ready_times
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.replay import Replay
from lightning_autosync.workload import Workload

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

BUNDLES = 32
"""Largest number of variable nodes in a graph; more variables are merged with their neighbours in backward order."""
_MOST = 128
"""Number of cached contexts, of a few hundred kilobytes each."""
_LEAST_SECONDS = 1e-6
"""Lower limit of `Context.scale`, for workloads that take no time."""


class Context:
    """A workload on a cluster, as simulators see it; each property is computed on first use.

    Args:
        workload: variables and times.
        cluster: a cluster with known rates.
        constants: costs of the hosts.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """

    def __init__(self, workload: Workload, cluster: ClusterSpec, constants: Constants) -> None:
        self.workload = workload
        self.cluster = cluster
        self.constants = constants
        self.replay = Replay(workload, cluster, constants)
        self.ranks = cluster.world_size
        self.depths: dict[tuple[int, ...], int] = {}

    @cached_property
    def link_graph(self) -> LinkGraph:
        return LinkGraph(self.cluster)

    @cached_property
    def scale(self) -> float:
        """Lower bound on the step in seconds: the unit of times, so that features transfer between workloads."""
        return max(_LEAST_SECONDS, step_bound(self.workload, self.cluster, self.constants.framing))

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each variable in backward order."""
        return {name: place for place, name in enumerate(self.workload.ready_order)}

    @cached_property
    def bytes(self) -> Floats:
        """[variables] bytes that a step changes, in backward order."""
        return numpy.array([changed_bytes(self.workload.variable(name)) for name in self.index])

    @cached_property
    def bundle_of(self) -> Integers:
        """[variables] bundle of each variable, in backward order; bundles balance bytes and numbers of variables."""
        count = len(self.bytes)
        if count <= BUNDLES:
            return numpy.arange(count)
        passed = (numpy.cumsum(self.bytes) - self.bytes / 2) / max(1.0, self.bytes.sum())
        place = (passed + (numpy.arange(count) + 0.5) / count) / 2
        return numpy.unique((BUNDLES * place).astype(numpy.int64), return_inverse=True)[1].astype(numpy.int64)

    @cached_property
    def variables(self) -> Floats:
        """[bundles, features] sizes and ready times of the variables, relative to the whole workload."""
        workload, bundle = self.workload, self.bundle_of
        ready = ready_times(workload)
        times = numpy.array([ready[name] for name in self.index])
        wise = numpy.array([workload.variable(name).kind != "dense" for name in self.index], dtype=float)
        counts = numpy.bincount(bundle).astype(float)
        size = numpy.bincount(bundle, self.bytes)
        return numpy.stack(
            [
                size / max(1.0, self.bytes.sum()),
                numpy.log10(size + 1) / 8,
                numpy.bincount(bundle, times) / counts / self.scale,
                numpy.log1p(counts),
                numpy.bincount(bundle, wise) / counts,
            ],
            axis=1,
        )

    @cached_property
    def devices(self) -> Floats:
        """[ranks, features] speed, share of the bandwidth, devices on the node, and number of ranks."""
        nodes = [self.cluster.nodes[index] for index in self.cluster.rank_nodes]
        return numpy.stack(
            [
                numpy.array([node.speed for node in nodes]),
                numpy.array(server_shares(self.cluster)) * self.ranks,
                numpy.log([node.devices for node in nodes]),
                numpy.full(self.ranks, numpy.log(self.ranks)),
            ],
            axis=1,
        )

    @cached_property
    def crossings(self) -> Floats:
        """[channels] share of the pairs of ranks whose route uses a channel."""
        pairs = [(i, j) for i in range(self.ranks) for j in range(self.ranks) if i != j]
        loads: Floats = self.link_graph.loads(pairs) / max(1, len(pairs))
        return loads

    @cached_property
    def links(self) -> Floats:
        """[channels, features] relative rate and latency, whether it is a link between nodes, and `crossings`."""
        rates = self.link_graph.capacities
        wired = 2 * len(self.cluster.links)
        typical = numpy.median(rates[:wired]) if wired else numpy.median(rates) if len(rates) else 1.0
        return numpy.stack(
            [
                numpy.log(rates / typical),
                numpy.log1p(1e4 * numpy.array([channel.latency for channel in self.link_graph.channels]) / self.scale),
                (numpy.arange(len(rates)) < wired).astype(float),
                self.crossings,
            ],
            axis=1,
        )

    @cached_property
    def attachments(self) -> tuple[Integers, Integers]:
        """Channels and ranks, as two arrays [pairs]: each channel is a first or last hop of that rank."""
        found = set()
        for i in range(self.ranks):
            for j in range(self.ranks):
                if route := self.link_graph.route(i, j):
                    found |= {(route[0], i), (route[-1], j)}
        pairs = numpy.array(sorted(found), dtype=numpy.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]


class Contexts:
    """A cache of the most recently used contexts, for one set of constants."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._kept: OrderedDict[tuple[str, str], Context] = OrderedDict()

    def of(self, workload: Workload, cluster: ClusterSpec, key: tuple[str, str] | None = None) -> Context:
        """The context of a workload on a cluster; ``key`` has their fingerprints, if known.

        Raises:
            ClusterError: the rates of the cluster are unknown.
        """
        key = key or (workload.fingerprint, cluster.fingerprint)
        if key not in self._kept:
            self._kept[key] = Context(workload, cluster, self._constants)
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
