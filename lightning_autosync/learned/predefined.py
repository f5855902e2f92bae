"""The inputs of AutoSync's simulators (NeurIPS 2020): 12 predefined features, and one vector for each shard.

Their cost model is simple. A server sends its reduced shard to each remote receiver; an all-reduce moves its message
once at the slowest rate. The model ignores overlap with backward, the factor 2 (n - 1) / n of a ring, and the links
between switches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.learned.context import Context, Floats, Integers
from lightning_autosync.learned.plan_arrays import COMPRESSORS, EVERYBODY, PlanArrays

SLOTS = 16
"""Number of one-hot inputs for servers, and for groups; further ones share them (modulo `SLOTS`)."""


class ShardSet(NamedTuple):
    """The shards of a plan by variable.

    Attributes:
        features: [shards, features] see `_vectors`.
        variable: [shards] bundle of variables of each shard, in backward order.
        group: [bundles] one of the messages of each bundle.
    """

    features: NDArray[numpy.float32]
    variable: NDArray[numpy.int64]
    group: NDArray[numpy.int64]


class _Costs(NamedTuple):
    """Shards of servers and all-reduced messages, as arrays [rows]: message, server, bytes, and costs [rows, 3]."""

    message: Integers
    root: Integers
    bytes: Floats
    costs: Floats


def predefined(arrays: PlanArrays) -> NDArray[numpy.float32]:
    """[12] maximum and sum, over servers and over groups, of transmission, overhead and device latency.

    Transmission is in units of the lower bound on the step; overhead and latency are counts of messages. All are
    logarithms.
    """
    rows = _costs(arrays)
    served = rows.root != EVERYBODY
    servers = _totals(rows.root[served], rows.costs[served])
    groups = _totals(rows.message[~served], rows.costs[~served])
    parts = [servers.max(axis=0), servers.sum(axis=0), groups.max(axis=0), groups.sum(axis=0)]
    return numpy.log1p(numpy.concatenate(parts)).astype(numpy.float32)


def shard_set(arrays: PlanArrays) -> ShardSet:
    """One vector for each shard of each variable."""
    context, rows = arrays.context, _costs(arrays)
    bundles = int(context.bundle_of.max()) + 1
    count = len(arrays.mode)
    pairs, place = numpy.unique(arrays.members * bundles + context.bundle_of, return_inverse=True)
    size = numpy.bincount(place, context.bytes)
    held: list[Integers] = [numpy.flatnonzero(pairs // bundles == message) for message in range(count)]
    pair = numpy.concatenate([held[message] for message in rows.message])
    row = numpy.repeat(numpy.arange(len(rows.message)), [len(held[message]) for message in rows.message])
    part = size[pair] / numpy.maximum(1.0, arrays.bytes[rows.message[row]])
    features = _vectors(arrays, rows, row, part)
    group = numpy.zeros(bundles, dtype=numpy.int64)
    group[pairs % bundles] = pairs // bundles
    return ShardSet(features.astype(numpy.float32), pairs[pair] % bundles, group)


def _vectors(arrays: PlanArrays, rows: _Costs, row: Integers, part: Floats) -> Floats:
    """[shards, features]: server and group (one-hot), compressor, flags, size and costs."""
    context, message, root = arrays.context, rows.message[row], rows.root[row]
    served, costs = root != EVERYBODY, rows.costs[row] * part[:, None]
    local, wise = arrays.local[message], arrays.row_wise[message]
    rates = _rates(context)
    # An all-reduced message has no root: it moves at the slowest rate.
    rate = numpy.where(served, rates[root], rates.min())
    flags = [served * local, served * (1 - local), served * wise, ~served]
    numbers = [
        rows.bytes[row] * part / max(1.0, context.bytes.sum()),
        numpy.log(rate / rates.max()),
        numpy.full(len(row), numpy.log(context.ranks / len(context.cluster.nodes))),
        *numpy.log1p(costs).T,
        served,
    ]
    return numpy.concatenate(
        [
            numpy.eye(SLOTS)[root % SLOTS] * served[:, None],
            numpy.eye(SLOTS)[message % SLOTS],
            numpy.eye(len(COMPRESSORS))[arrays.compressor[message]],
            numpy.stack([numpy.asarray(column, dtype=float) for column in (*flags, *numbers)], axis=1),
        ],
        axis=1,
    )


def _costs(arrays: PlanArrays) -> _Costs:
    """Transmission, overhead and latency of each shard on a server, and of each all-reduced message."""
    context, shards = arrays.context, arrays.shards
    rates = _rates(context)
    replicas = context.ranks / len(context.cluster.nodes)
    on_server = (shards.root != EVERYBODY) & (arrays.by_servers[shards.message] > 0)
    message, root = shards.message[on_server], shards.root[on_server]
    receivers = numpy.where(arrays.local[message] > 0, len(context.cluster.nodes) - 1.0, _remote(context)[root])
    sent = shards.bytes[on_server] * receivers / rates[root]
    servers = numpy.stack([sent / context.scale, receivers, numpy.full(len(message), replicas)], axis=1)
    whole = numpy.setdiff1d(numpy.arange(len(arrays.mode)), message)
    moved = arrays.bytes[whole] / rates.min() / context.scale
    groups = numpy.stack(
        [moved, numpy.full(len(whole), float(context.ranks)), numpy.full(len(whole), replicas)], axis=1
    )
    return _Costs(
        numpy.concatenate([message, whole]),
        numpy.concatenate([root, numpy.full(len(whole), EVERYBODY)]),
        numpy.concatenate([shards.bytes[on_server], arrays.bytes[whole]]),
        numpy.concatenate([servers, groups]),
    )


def _remote(context: Context) -> Floats:
    """[ranks] number of ranks on other nodes; in a one-node cluster the number of other ranks."""
    node = numpy.array(context.cluster.rank_nodes)
    together = (node[:, None] == node[None, :]).sum(axis=1)
    remote: Floats = context.ranks - numpy.where(together < context.ranks, together, 1).astype(float)
    return remote


def _rates(context: Context) -> Floats:
    """[ranks] bytes/s of the fastest route from a rank to another node; in a one-node cluster to another rank."""
    node = context.cluster.rank_nodes
    lone = len(set(node)) == 1
    rates = numpy.ones(context.ranks)
    for i in range(context.ranks):
        others = [j for j in range(context.ranks) if j != i and (lone or node[i] != node[j])]
        rates[i] = max((context.link_graph.bandwidth(i, j) for j in others), default=1.0)
    return rates


def _totals(keys: Integers, costs: Floats) -> Floats:
    """[distinct keys, 3] sums of the costs; one row of zeros if there are no keys."""
    if not len(keys):
        return numpy.zeros((1, 3))
    distinct, place = numpy.unique(keys, return_inverse=True)
    totals = numpy.zeros((len(distinct), 3))
    numpy.add.at(totals, place, costs)
    return totals
