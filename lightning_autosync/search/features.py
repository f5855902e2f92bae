"""Plans as feature vectors: the share of bytes at each place of the backward pass that each method carries."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy
from numpy.typing import NDArray

from lightning_autosync.plan import Group, SyncPlan, codecs
from lightning_autosync.plan.topologies import find
from lightning_autosync.workload import Workload

Floats = NDArray[numpy.float64]

PLACES = 8
"""Number of equal parts of the bytes, in the order of backward."""
_METHODS = ("native", "server", "shared_memory", "ring", "tree", "star", "hierarchical", "packed")
_METHOD_OF = {"all_reduce": "native", "all_to_all": "server", "two_level": "hierarchical"}
"""Methods of those topologies in `MODES` that have other names here."""
_COMPRESSORS = ("fp16", "bf16", "int8", "topk", "powersgd")
_SIZES = (1 / 2, 1 / 8, 1 / 32)
"""Least shares of all bytes for the size classes of messages, largest class first."""
_SMALL_SEGMENT = 64 * 1024
_CHANNELS = (
    *_METHODS,
    *_COMPRESSORS,
    *(f"size{number}" for number in range(len(_SIZES) + 1)),
    "one_server",
    "weighted",
    "aggregated",
    "urgent",
    "small_segment",
    "large_segment",
)
_INDEX = {name: number for number, name in enumerate(_CHANNELS)}
POOLED = len(_CHANNELS) + 1
"""Length of the part of a vector that is summed over places."""


class PlanFeatures:
    """Makes feature vectors of plans for one workload. Vectors of different workloads are comparable."""

    def __init__(self, workload: Workload) -> None:
        order = [workload.variable(name) for name in workload.ready_order]
        total = float(sum(variable.bytes for variable in order)) or 1.0
        ends = numpy.cumsum([variable.bytes for variable in order]) / total
        starts = numpy.concatenate([[0.0], ends[:-1]])
        edges = numpy.linspace(0.0, 1.0, PLACES + 1)
        lower = numpy.maximum(starts[:, None], edges[None, :-1])
        upper = numpy.minimum(ends[:, None], edges[None, 1:])
        self._share = numpy.maximum(upper - lower, 0.0)
        self._row = {variable.name: row for row, variable in enumerate(order)}

    def __call__(self, plan: SyncPlan) -> Floats:
        """[channels * (places + 1) + 1] feature vector of a plan.

        The first `POOLED` numbers are sums over places: for each channel its share of all bytes, then the logarithm of
        the number of messages. Then follow the shares of each place's bytes, scaled so that the squared distance of two
        plans is the mean over places.
        """
        shares = numpy.zeros((PLACES, len(_CHANNELS)))
        for group in plan.groups:
            mass = self._share[[self._row[name] for name in group.variables]].sum(axis=0)
            for channel in _channels(group, float(mass.sum())):
                shares[:, _INDEX[channel]] += mass
        count = math.log2(len(plan.groups)) / 10
        return numpy.concatenate([shares.sum(axis=0), [count], shares.ravel() * PLACES**0.5])


def similarity(vectors: Floats, other: Floats) -> Floats:
    """[n, m] similarity of plans, from 0 to 1, for vectors [n, features] and [m, features]."""
    return numpy.exp(-2 * squared_distance(vectors, other))


def squared_distance(vectors: Floats, other: Floats) -> Floats:
    """[n, m] squared distances between the parts of vectors that are not summed over places."""
    one, two = vectors[:, POOLED:], other[:, POOLED:]
    squares = (one**2).sum(axis=1)[:, None] + (two**2).sum(axis=1)[None, :] - 2 * one @ two.T
    distances: Floats = numpy.maximum(squares, 0.0)
    return distances


def _channels(group: Group, share: float) -> Iterator[str]:
    has_server = group.architecture == "parameter_server"
    mode = find(group.topology).encoded_as
    yield "server" if has_server and mode == "all_reduce" else _METHOD_OF.get(mode, mode)
    if group.compressor.kind != "none":
        yield codecs.find(group.compressor.kind).encoded_as
    yield f"size{next((number for number, least in enumerate(_SIZES) if share >= least), len(_SIZES))}"
    if has_server and len(set(group.placement or (0,))) == 1:
        yield "one_server"
    if group.partition is not None and group.partition.weights is not None:
        yield "weighted"
    if group.local_aggregation:
        yield "aggregated"
    if group.priority > 0:
        yield "urgent"
    if group.segment is not None:
        yield "small_segment" if group.segment <= _SMALL_SEGMENT else "large_segment"
