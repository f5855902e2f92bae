"""A compiled plan as arrays, with one row per message and one row per shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy

from lightning_autosync.learned.context import Context, Floats, Integers
from lightning_autosync.plan import SyncPlan, codecs, compile_plan
from lightning_autosync.plan.messages import ITEMSIZE
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    RowBroadcast,
    SharedMemoryReduce,
    Transfer,
    TreeTransfer,
    TwoLevelAllReduce,
)
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import MODES, find
from lightning_autosync.replay.prediction import Prediction

COMPRESSORS = ("none", "fp16", "bf16", "int8", "topk", "powersgd")
EVERYBODY = -1
"""Stands for no root: every rank reduces a part."""
_MODE_OF = {AllReduce: 0, AllToAll: 1, SharedMemoryReduce: 2, TwoLevelAllReduce: 3}


class Shards(NamedTuple):
    """Ranges of messages, as arrays [shards].

    Attributes:
        message: index of the message.
        root: rank that reduces the range, or `EVERYBODY`.
        bytes: bytes of the sum; for a table those of the touched rows.
        pieces: number of pieces into which the range is cut on the wire.
        depth: largest number of hops to a rank, the mean of both trees; 0 for native collectives.
    """

    message: Integers
    root: Integers
    bytes: Floats
    pieces: Floats
    depth: Floats


@dataclass(frozen=True)
class PlanArrays:
    """A plan, compiled for a context and priced by its replay.

    Attributes:
        context: workload and cluster.
        prediction: the replay's prediction.
        fluid: seconds of the step as predicted by the replay's fluid model.
        mode, compressor: [messages] indices into `MODES` and `COMPRESSORS`.
        by_servers, local, row_wise: [messages] 1 if servers reduce, if nodes aggregate first, if the message is
            row-wise; else 0.
        priority: [messages] priority of the group.
        bytes: [messages] bytes that a step changes.
        members: [variables] message of each variable, in backward order.
        shards: ranges of the messages and their roots.
    """

    context: Context
    prediction: Prediction
    fluid: float
    mode: Integers
    compressor: Integers
    by_servers: Floats
    local: Floats
    row_wise: Floats
    priority: Floats
    bytes: Floats
    members: Integers
    shards: Shards


def plan_arrays(context: Context, plan: SyncPlan) -> PlanArrays:
    """Compile a plan, price it by the replay, and describe both as arrays.

    Raises:
        PlanError: the plan has no schedule, or is not for this workload and cluster.
    """
    schedule = compile_plan(plan, context.workload, context.cluster)
    groups, messages = plan.groups, schedule.messages
    members = numpy.empty(len(context.bytes), dtype=numpy.int64)
    for message in messages:
        members[[context.index[name] for name in message.variables]] = message.index
    size: Floats = numpy.bincount(members, context.bytes, len(messages)).astype(numpy.float64)
    return PlanArrays(
        context=context,
        prediction=context.replay.predict(schedule),
        fluid=context.replay.predict(schedule, "fluid").step_time,
        mode=numpy.array([_mode(message, group) for message, group in zip(messages, groups, strict=True)]),
        compressor=numpy.array([COMPRESSORS.index(codecs.find(group.compressor.kind).encoded_as) for group in groups]),
        by_servers=numpy.array([group.architecture == "parameter_server" for group in groups], dtype=float),
        local=numpy.array([group.local_aggregation for group in groups], dtype=float),
        row_wise=numpy.array([message.rows > 0 for message in messages], dtype=float),
        priority=numpy.array([group.priority for group in groups], dtype=float),
        bytes=size,
        members=members,
        shards=_shards(context, messages, size),
    )


def _mode(message: Message, group: Group) -> int:
    first = message.rounds[0].transfers[0] if message.rounds[0].transfers else None
    return _MODE_OF[type(first)] if type(first) in _MODE_OF else MODES.index(find(group.topology).encoded_as)


def _shards(context: Context, messages: tuple[Message, ...], size: Floats) -> Shards:
    rows: list[tuple[int, int, float, int, float]] = []
    for message in messages:
        whole = max(1, message.numel * ITEMSIZE[message.dtype])
        unit = ITEMSIZE[message.dtype] * float(size[message.index]) / whole
        for transfer in (transfer for round in message.rounds for transfer in round.transfers):
            for root, numel, pieces, depth in _ranges(context, transfer):
                rows.append((message.index, root, unit * numel, pieces, depth))
    return Shards(
        numpy.array([row[0] for row in rows], dtype=numpy.int64),
        numpy.array([row[1] for row in rows], dtype=numpy.int64),
        numpy.array([row[2] for row in rows], dtype=numpy.float64),
        numpy.array([row[3] for row in rows], dtype=numpy.float64),
        numpy.array([row[4] for row in rows], dtype=numpy.float64),
    )


def _ranges(context: Context, transfer: Transfer) -> Iterator[tuple[int, int, int, float]]:
    """Root, elements, pieces and depth of each range of a transfer."""
    if isinstance(transfer, TreeTransfer):
        numel = transfer.stop - transfer.start
        for tree in (transfer.reduce, transfer.broadcast):
            if tree.parents not in context.depths:
                context.depths[tree.parents] = tree.depth
        depth = (context.depths[transfer.reduce.parents] + context.depths[transfer.broadcast.parents]) / 2
        yield transfer.root, numel, ceil(numel / transfer.segment), depth
    elif isinstance(transfer, PairwiseReduce):
        numel = transfer.stop - transfer.start
        yield EVERYBODY, numel, ceil(numel / transfer.segment), len(transfer.swaps) / 2
    elif isinstance(transfer, RowBroadcast):
        depth = sum(tree.depth for tree in transfer.trees) / len(transfer.trees)
        yield EVERYBODY, transfer.stop - transfer.start, 1, depth
    elif isinstance(transfer, AllToAll):
        for owner, start, stop in zip(transfer.owners, transfer.bounds, transfer.bounds[1:], strict=False):
            yield owner, stop - start, 1, 1
    else:
        yield EVERYBODY, transfer.stop - transfer.start, 1, 0
