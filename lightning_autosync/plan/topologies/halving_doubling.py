"""Rabenseifner's all-reduce: a reduce-scatter by recursive halving, and an all-gather by recursive doubling."""

from __future__ import annotations

from lightning_autosync.plan.topologies import Method, register
from lightning_autosync.plan.topologies.recursive_doubling import RecursiveDoubling


class HalvingDoubling(RecursiveDoubling):
    """Twice as many exchanges as recursive doubling, but no rank sends more than twice the message.

    The largest parts travel between ranks of a node or rack.
    """

    name = "halving_doubling"
    label = "halving and doubling"
    hatch = "**"
    offers = (Method("halving_doubling"),)
    halves = True


register(HalvingDoubling())
