"""The main threads' work as stages of their own, which share the cores with those that communicate."""

from __future__ import annotations

import numpy

from lightning_autosync.replay.compute import Chores
from lightning_autosync.replay.fluid import Conditions
from lightning_autosync.replay.network import Network


def with_chores(conditions: Conditions, chores: Chores, network: Network) -> Conditions:
    """The conditions with a stage for each part of the main threads' work behind all others.

    Parts follow each other. They go before what communicates: a thread that sleeps most of the time is served soon
    after it wakes, those that handle one frame after the other are not.
    """
    count, parts = len(conditions.fill), len(chores.core)
    core = numpy.array(chores.core)
    work = numpy.zeros((parts, conditions.work.shape[1]))
    work[:, network.links : network.links + network.ranks] = core[:, None]
    work[:, network.shared_core] = network.ranks * core
    after = numpy.full((parts, 3), -1, dtype=numpy.int64)
    after[1:, 0] = count + numpy.arange(parts - 1)
    rivals = numpy.ones((count + parts, count + parts), dtype=numpy.bool_)
    rivals[:count, :count] = conditions.rivals
    return Conditions(
        numpy.concatenate([conditions.work, work]),
        numpy.concatenate([conditions.fill, numpy.zeros(parts)]),
        numpy.concatenate([conditions.release, chores.release]),
        numpy.concatenate([conditions.delay, numpy.zeros(parts)]),
        numpy.concatenate([conditions.after, after]),
        numpy.concatenate([conditions.urgency, numpy.arange(-parts, 0)]),
        numpy.concatenate([conditions.queue, numpy.full(parts, -1)]),
        rivals,
    )
