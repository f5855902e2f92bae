"""What `fluid` runs: the stages, the main threads' work, and what fast ranks send before the slowest rank is ready."""

from __future__ import annotations

import logging
from bisect import bisect, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from lightning_autosync.replay.compute import Compute, HostWork
from lightning_autosync.replay.fluid import StageConditions
from lightning_autosync.replay.loads import LoadModel, Loads
from lightning_autosync.replay.network import Flags, Indices, NetworkArrays, Trees
from lightning_autosync.replay.outcome import StartOrder
from lightning_autosync.replay.paces import Paces
from lightning_autosync.replay.stages import Stage

_log = logging.getLogger(__name__)

_MOST_CLASSES = 4
"""Largest number of speeds that `fluid` tells apart: each further one adds a part to each stage."""
_ALIKE = 1.02
"""Largest ratio of speeds that counts as noise.

On 16 nodes whose speeds differ by 0.5%, classes make a fluid of 120 messages 2 to 4 times as slow, and change its
step time by less than 1e-5."""
_MOST_PACED = 256
"""Largest number of connections with a pace that `fluid` simulates where ranks have different speeds.

Each is a channel, so many make it slow. With more of them, `fluid` ignores all paces: a connection may then be faster
than the engine lets it be. A line of the log at level DEBUG says so."""

_LAST = 1 << 40
"""Urgency of the main threads' work: stages that communicate come first."""


class SpeedClass(NamedTuple):
    """Ranks that count as equally fast.

    Attributes:
        ranks: [ranks] whether a rank belongs to the class.
        compute: the compute timeline of its slowest rank.
        host_work: the main threads' work of that rank; None if ranks have cores of their own.
    """

    ranks: Flags
    compute: Compute
    host_work: HostWork | None


def classify(speeds: Sequence[float]) -> Indices:
    """[ranks] the class of each rank by its speed, 0 for the slowest.

    Classes are cut at the largest ratios of neighbouring speeds. Speeds within a ratio of `_ALIKE` stay in one class.
    """
    distinct = numpy.unique(speeds)
    gaps = 1 + numpy.argsort(-distinct[1:] / distinct[:-1], kind="stable")
    edges = [0, len(distinct)]
    for gap in gaps.tolist():
        place = bisect(edges, gap)
        alike = distinct[edges[place] - 1] <= _ALIKE * distinct[edges[place - 1]]
        if not alike and len(edges) <= _MOST_CLASSES:
            insort(edges, gap)
    return numpy.searchsorted(distinct[edges[1:-1]], speeds, side="right").astype(numpy.int64)


def stage_conditions(
    stages: Sequence[Stage],
    loads: Loads,
    order: StartOrder,
    classes: Sequence[SpeedClass],
    load_model: LoadModel,
    network: NetworkArrays,
    trees: Trees,
) -> tuple[StageConditions, Paces]:
    """The conditions of a step, and the connections that are channels after the network's.

    If all ranks are ready at once, no connection reaches its pace, since paces fit the shares of whole messages. A part
    of a message has other shares. So with several classes, connections with a pace are channels; none if there are more
    than `_MOST_PACED`.

    Args:
        stages, loads, order: the stages, their loads, and the conditions of their starts on the slowest rank.
        classes: the ranks by speed, the slowest first.
        load_model: divides loads by class.
        network, trees: those of the replay.

    Returns:
        Conditions of the stages in their order, then of the main threads' work class by class, then of early parts.
    """
    whole = numpy.arange(len(stages))
    conditions = StageConditions(loads.work, loads.fill, loads.waiting, order, loads.rivals(), whole, loads.fill)
    for each in classes:
        if each.host_work is not None:
            conditions = _with_host_work(conditions, each.host_work, each.ranks, network)
    nothing = Paces.none()
    if len(classes) == 1:
        return conditions, nothing
    paces = Paces.of(stages, loads, trees, network)
    if len(paces.pairs) > _MOST_PACED:
        _log.debug("paces are ignored: %d connections with a pace exceed %d", len(paces.pairs), _MOST_PACED)
        paces = nothing
    return _with_early_parts(conditions, stages, loads, classes, load_model, paces), paces


def _with_host_work(
    conditions: StageConditions, host_work: HostWork, ranks: Flags, network: NetworkArrays
) -> StageConditions:
    """Append one stage for each part of the work of some ranks' main threads to the conditions.

    Parts follow each other. They are less urgent than all stages that communicate: the kernel prefers threads that
    sleep most of the time, and those that move messages wait for links.
    """
    count, parts = len(conditions.fill), len(host_work.core)
    core, none = numpy.array(host_work.core), numpy.zeros(parts)
    work = numpy.zeros((parts, conditions.work.shape[1]))
    work[:, network.links : network.links + network.ranks] = core[:, None] * ranks
    work[:, network.shared_core] = ranks.sum() * core
    after = numpy.full((parts, 3), -1, dtype=numpy.int64)
    after[1:, 0] = count + numpy.arange(parts - 1)
    # Main threads of different classes share the cores.
    stages = conditions.order.urgency < _LAST
    rivals = numpy.ones((count + parts, count + parts), dtype=numpy.bool_)
    rivals[:count, :count] = conditions.rivals
    rivals[:count, count:], rivals[count:, :count] = stages[:, None], stages
    urgency, queue = _LAST + numpy.arange(parts), numpy.full(parts, -1, dtype=numpy.int64)
    own = StartOrder(numpy.array(host_work.release), none, after, urgency, queue)
    return StageConditions(
        numpy.concatenate([conditions.work, work]),
        numpy.concatenate([conditions.fill, none]),
        numpy.concatenate([conditions.waiting, none]),
        _joined(conditions.order, own),
        rivals,
        numpy.arange(count + parts),
        numpy.concatenate([conditions.whole_fill, none]),
    )


def _with_early_parts(
    conditions: StageConditions,
    stages: Sequence[Stage],
    loads: Loads,
    classes: Sequence[SpeedClass],
    load_model: LoadModel,
    paces: Paces,
) -> StageConditions:
    """Append what each stage sends before the slowest rank is ready, slower classes first, and take it from the stage.

    A part that begins takes over what is left of faster classes, so that one part of a stage runs at a time.
    """
    order = conditions.order
    alone = order.after[: len(stages), 0] < 0
    parted = alone & numpy.array([not stage.deferred and bool(stage.flows) for stage in stages], dtype=numpy.bool_)
    of_rank = numpy.zeros(len(classes[0].ranks), dtype=numpy.int64)
    for place, each in enumerate(classes):
        of_rank[each.ranks] = place
    work_by_class, fill_by_class = load_model.by_class(loads, of_rank, parted, paces.pairs, paces.rates)
    number, stage = numpy.nonzero(work_by_class[1:].any(axis=2))
    number += 1
    work, fill = numpy.pad(conditions.work, ((0, 0), (0, len(paces.pairs)))), conditions.fill.copy()
    work[: len(stages)][parted], fill[: len(stages)][parted] = work_by_class[0, parted], fill_by_class[0, parted]
    chosen = zip(number.tolist(), stage.tolist(), strict=True)
    release = [classes[one].compute.start[stages[other].message] for one, other in chosen]
    after = order.after[stage]
    if classes[0].host_work is not None:
        after[:, 2] += number * len(classes[0].host_work.core)
    own = StartOrder(numpy.array(release), numpy.zeros(len(stage)), after, order.urgency[stage], order.queue[stage])
    rows = numpy.concatenate([numpy.arange(len(fill)), stage])
    return StageConditions(
        numpy.concatenate([work, work_by_class[number, stage]]),
        numpy.concatenate([fill, fill_by_class[number, stage]]),
        numpy.concatenate([conditions.waiting, numpy.zeros(len(stage))]),
        _joined(order, own),
        conditions.rivals[numpy.ix_(rows, rows)],
        conditions.whole[rows],
        conditions.whole_fill[rows],
    )


def _joined(first: StartOrder, second: StartOrder) -> StartOrder:
    return StartOrder(*(numpy.concatenate(both) for both in zip(first, second, strict=True)))
