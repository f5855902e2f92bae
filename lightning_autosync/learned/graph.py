"""A plan as a heterogeneous graph of variables, messages, shards, devices and links."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_autosync.learned.context import Floats, Integers
from lightning_autosync.learned.plan_arrays import COMPRESSORS, EVERYBODY, PlanArrays
from lightning_autosync.plan.topologies import MODES

PATH = ("forward", "backward", "optimizer", "finish", "launch", "hosts", "cores", "pipeline", "links")
"""Kinds of spans on a critical path."""
_ON = {"its pipeline": "pipeline", "shared cores": "cores"}


def overall(arrays: PlanArrays) -> Floats:
    """[features] of a whole plan: shares, logarithms of counts, and the replay's step relative to its lower bound."""
    return numpy.concatenate([_times(arrays), _counts(arrays), _kinds(arrays), _surroundings(arrays)])


def _times(arrays: PlanArrays) -> Floats:
    """[features] of the replay's prediction."""
    prediction, context = arrays.prediction, arrays.context
    step = prediction.step_time
    links = len(context.link_graph.channels)
    busy = prediction.demand.sum(axis=0) / step
    wires, hosts, cores = busy[:links], busy[links : links + context.ranks], busy[links + context.ranks :]
    workload = context.workload
    path = dict.fromkeys(PATH, 0.0)
    for span in prediction.critical_path:
        path[_waits_for(span.name)] += span.seconds / step
    shares = [
        numpy.log(step / context.scale),
        numpy.log(step),
        numpy.log(arrays.fluid / step),
        prediction.synchronization_time / step,
        (workload.forward_time + workload.backward_time) / step,
        wires.max(initial=0.0),
        wires.mean() if links else 0.0,
        hosts.max(),
        hosts.mean(),
        cores.sum(),
    ]
    return numpy.array([*shares, *path.values()])


def _waits_for(name: str) -> str:
    if name in PATH:
        return name
    channel = name.rpartition(" on ")[2]
    if channel.startswith("paced connection "):
        return "pipeline"  # trained models know both under one name
    return _ON.get(channel, "hosts" if channel.startswith("host of rank ") else "links")


def _counts(arrays: PlanArrays) -> Floats:
    """[features] numbers of messages, shards and pieces, in total and per second."""
    shards, step = arrays.shards, arrays.prediction.step_time
    numbers = [
        len(arrays.mode),
        len(shards.message),
        shards.pieces.sum(),
        (arrays.mode == 0).sum(),
        (arrays.mode == 1).sum(),
        (arrays.mode > 3).sum(),
        (shards.pieces * (shards.depth > 0)).sum(),
    ]
    ranks = arrays.context.ranks
    crowd = arrays.context.constants.crowd(ranks)
    a_second = [1e-3 * crowd * ranks * number / step for number in (len(arrays.mode), shards.pieces.sum())]
    depth = numpy.average(shards.depth, weights=shards.bytes + 1) if len(shards.depth) else 0.0
    return numpy.array([*numpy.log1p(numbers), *numpy.log1p(a_second), depth / ranks])


def _kinds(arrays: PlanArrays) -> Floats:
    """[features] shares of the bytes by mode, compressor and flag; shares of the messages by mode."""
    weights = arrays.bytes / max(1.0, arrays.bytes.sum())
    modes = numpy.bincount(arrays.mode, weights, len(MODES))
    compressors = numpy.bincount(arrays.compressor, weights, len(COMPRESSORS))
    counts = numpy.bincount(arrays.mode, minlength=len(MODES)) / len(arrays.mode)
    flags = [
        weights @ arrays.by_servers,
        weights @ arrays.local,
        weights @ arrays.row_wise,
        weights @ (arrays.priority > 0),
    ]
    return numpy.concatenate([modes, compressors, counts, flags])


def _surroundings(arrays: PlanArrays) -> Floats:
    """[features] of the workload and the cluster, equal for all plans."""
    context = arrays.context
    rates = context.link_graph.capacities
    latencies = [channel.latency for channel in context.link_graph.channels]
    return numpy.array(
        [
            numpy.log(context.ranks),
            numpy.log(len(context.cluster.nodes)),
            numpy.log10(context.bytes.sum() + 1) / 8,
            numpy.log(len(context.bytes)),
            numpy.log(rates.max() / rates.min()) if len(rates) else 0.0,
            numpy.log1p(1e4 * max(latencies, default=0.0) / context.scale),
            numpy.log(context.constants.crowd(context.ranks)),
        ]
    )


MESSAGES = 24
"""Approximate largest number of message nodes in a graph; more messages are merged with neighbours of their kind."""

NODES = ("variable", "message", "shard", "device", "link")
RELATIONS = (
    ("variable", "travels in", "message"),
    ("message", "precedes", "message"),
    ("message", "follows", "message"),
    ("shard", "part of", "message"),
    ("message", "cut into", "shard"),
    ("shard", "reduced at", "device"),
    ("device", "reduces", "shard"),
    ("message", "routed over", "link"),
    ("link", "carries", "message"),
    ("device", "handles", "message"),
    ("link", "attached to", "device"),
    ("device", "sends over", "link"),
)
"""Types of edges: source, relation, target."""


class Edges(NamedTuple):
    """Edges of one relation, as arrays [edges]: indices of their ends among the nodes of their types, and weights."""

    source: NDArray[numpy.int32]
    target: NDArray[numpy.int32]
    weight: NDArray[numpy.float32]


class PlanGraph(NamedTuple):
    """A plan on a cluster.

    Attributes:
        nodes: features [nodes, features] of each type in `NODES`.
        edges: edges of each relation in `RELATIONS`.
        overall: [features] of the plan as a whole.
    """

    nodes: tuple[NDArray[numpy.float32], ...]
    edges: tuple[Edges, ...]
    overall: NDArray[numpy.float32]


def encode_graph(arrays: PlanArrays) -> PlanGraph:
    """The graph of a plan. All numbers are shares, logarithms, or times in units of the replay's step."""
    context = arrays.context
    merged = merge(arrays)
    shards = _shard_nodes(arrays, merged)
    messages = _message_nodes(arrays, merged)
    links = len(context.link_graph.channels)
    busy = arrays.prediction.demand.sum(axis=0) / arrays.prediction.step_time
    devices = numpy.column_stack([context.devices, busy[links : links + context.ranks]])
    channels = numpy.column_stack([context.links, busy[:links]])
    nodes = (context.variables, messages, shards.features, devices, channels)
    return PlanGraph(
        tuple(array.astype(numpy.float32) for array in nodes),
        tuple(_edges(arrays, merged, shards)),
        overall(arrays).astype(numpy.float32),
    )


def merge(arrays: PlanArrays) -> Integers:
    """[messages] node of each message; up to `MESSAGES` messages have a node each."""
    count = len(arrays.mode)
    if count <= MESSAGES:
        return numpy.arange(count)
    flags = 4 * arrays.by_servers + 2 * arrays.local + (arrays.priority > 0)
    kind = (8 * (arrays.mode * len(COMPRESSORS) + arrays.compressor) + flags).astype(numpy.int64)
    kind = numpy.unique(kind, return_inverse=True)[1]
    place = numpy.zeros(count, dtype=numpy.int64)
    for one in range(kind.max() + 1):
        members = numpy.flatnonzero(kind == one)
        nodes = max(1, round(MESSAGES * len(members) / count))
        place[members] = numpy.arange(len(members)) * nodes // len(members)
    made = numpy.unique(kind * count + place, return_inverse=True)[1]
    first = numpy.full(made.max() + 1, count)
    numpy.minimum.at(first, made, numpy.arange(count))
    order = numpy.empty_like(first)
    order[numpy.argsort(first)] = numpy.arange(len(first))
    return order[made].astype(numpy.int64)


def _mean(merged: Integers, values: Floats) -> Floats:
    """[nodes] means over the messages of each node."""
    means: Floats = numpy.bincount(merged, values) / numpy.bincount(merged)
    return means


def _message_nodes(arrays: PlanArrays, merged: Integers) -> Floats:
    prediction, context, count = arrays.prediction, arrays.context, len(arrays.mode)
    step, links = prediction.step_time, len(context.link_graph.channels)
    times = numpy.array([(span.ready, span.start, span.end) for span in prediction.timeline.messages]) / step
    demand = _demand(arrays, merged)
    hosts = demand[:, links : links + context.ranks]
    shards = arrays.shards
    per_message = [numpy.bincount(shards.message, values, count) for values in (None, shards.pieces)]
    depth = numpy.zeros(count)
    numpy.maximum.at(depth, shards.message, shards.depth)
    size = numpy.bincount(merged, arrays.bytes)
    columns = [
        *(_mean(merged, (arrays.mode == mode).astype(float)) for mode in range(len(MODES))),
        *(_mean(merged, (arrays.compressor == kind).astype(float)) for kind in range(1, len(COMPRESSORS))),
        *(_mean(merged, flag) for flag in (arrays.by_servers, arrays.local, arrays.row_wise)),
        _mean(merged, numpy.sign(arrays.priority)),
        numpy.log1p(numpy.bincount(merged)),
        size / max(1.0, size.sum()),
        numpy.log10(size + 1) / 8,
        *(_mean(merged, times[:, column]) for column in range(3)),
        _mean(merged, times[:, 2] - times[:, 1]),
        _mean(merged, times[:, 1] - times[:, 0]),
        demand[:, :links].max(axis=1, initial=0.0),
        hosts.max(axis=1),
        hosts.mean(axis=1),
        demand[:, links + context.ranks :].sum(axis=1),
        *(numpy.log1p(numpy.bincount(merged, values)) for values in per_message),
        _mean(merged, depth) / context.ranks,
    ]
    return numpy.stack(columns, axis=1)


def _demand(arrays: PlanArrays, merged: Integers) -> Floats:
    """[nodes, channels] share of the step in which a message node keeps a channel busy."""
    demand = numpy.zeros((merged.max() + 1, arrays.prediction.demand.shape[1]))
    numpy.add.at(demand, merged, arrays.prediction.demand / arrays.prediction.step_time)
    return demand


class _ShardNodes(NamedTuple):
    features: Floats
    message: Integers
    root: Integers
    share: Floats


def _shard_nodes(arrays: PlanArrays, merged: Integers) -> _ShardNodes:
    """One node for all shards of a message with the same root."""
    shards, ranks = arrays.shards, arrays.context.ranks
    code, place = numpy.unique(merged[shards.message] * (ranks + 1) + shards.root + 1, return_inverse=True)
    message, root = code // (ranks + 1), code % (ranks + 1) - 1
    count, size = numpy.bincount(place), numpy.bincount(place, shards.bytes)
    share = size / numpy.maximum(1.0, numpy.bincount(message, size)[message])
    features = [
        share,
        size / max(1.0, arrays.bytes.sum()),
        numpy.log10(size + 1) / 8,
        numpy.log1p(count),
        numpy.log1p(numpy.bincount(place, shards.pieces)),
        numpy.bincount(place, shards.depth) / count / ranks,
        (root == EVERYBODY).astype(float),
    ]
    return _ShardNodes(numpy.stack(features, axis=1), message, root, share)


def _edges(arrays: PlanArrays, merged: Integers, shards: _ShardNodes) -> list[Edges]:
    """The edges, in the order of `RELATIONS`."""
    context = arrays.context
    links, nodes = len(context.link_graph.channels), int(merged.max()) + 1
    demand = _demand(arrays, merged)
    later = numpy.arange(1, nodes)
    pieces = numpy.arange(len(shards.message))
    at = _placements(shards, context.ranks)
    routed = _nonzero(demand[:, :links])
    handled = _nonzero(demand[:, links : links + context.ranks])
    ones = numpy.ones(len(context.attachments[0]))
    return [
        _travels(arrays, merged),
        _edge(later - 1, later, numpy.ones(nodes - 1)),
        _edge(later, later - 1, numpy.ones(nodes - 1)),
        _edge(pieces, shards.message, shards.share),
        _edge(shards.message, pieces, numpy.ones(len(pieces))),
        at,
        Edges(at.target, at.source, at.weight),
        routed,
        Edges(routed.target, routed.source, routed.weight),
        Edges(handled.target, handled.source, handled.weight),
        _edge(*context.attachments, ones / 2),
        _edge(*context.attachments[::-1], ones),
    ]


def _travels(arrays: PlanArrays, merged: Integers) -> Edges:
    """Edges from bundles to messages; the weight is the bundle's share of the message's bytes."""
    context = arrays.context
    bundles = int(context.bundle_of.max()) + 1
    code, place = numpy.unique(merged[arrays.members] * bundles + context.bundle_of, return_inverse=True)
    message, size = code // bundles, numpy.bincount(place, context.bytes)
    return _edge(code % bundles, message, size / numpy.maximum(1.0, numpy.bincount(message, size)[message]))


def _placements(shards: _ShardNodes, ranks: int) -> Edges:
    """Edges from shards to the devices that reduce them; a shard that all ranks reduce has an equal part on each."""
    rooted, free = numpy.flatnonzero(shards.root >= 0), numpy.flatnonzero(shards.root == EVERYBODY)
    source = numpy.concatenate([rooted, numpy.repeat(free, ranks)])
    target = numpy.concatenate([shards.root[rooted], numpy.tile(numpy.arange(ranks), len(free))])
    weight = numpy.concatenate([numpy.ones(len(rooted)), numpy.full(len(free) * ranks, 1 / ranks)])
    return _edge(source, target, weight * shards.share[source])


def _nonzero(demand: Floats) -> Edges:
    source, target = numpy.nonzero(demand)
    return _edge(source, target, demand[source, target])


def _edge(source: Integers, target: Integers, weight: Floats) -> Edges:
    return Edges(source.astype(numpy.int32), target.astype(numpy.int32), weight.astype(numpy.float32))
