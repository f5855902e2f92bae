"""Sums in memory that all ranks of a node map."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autosync.plan.messages import even_bounds
from lightning_autosync.plan.schedule import SharedMemoryReduce, Transfer
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, MessageCut, Method, Site, Topology, register
from lightning_autosync.plan.topologies.base import ALL_REDUCE

CACHE_LINE = 64
"""Bytes of a cache line; ranks that write to the same line at the same time slow each other down."""


class SharedMemoryTopology(Topology):
    """Each rank sums its part of the buffers of all ranks in place; nothing is sent."""

    name = "shared_memory"
    label = "shared memory"
    hatch = "..."
    encoded_as = "shared_memory"
    offers = (Method("shared_memory", place=10),)
    architectures = (ALL_REDUCE,)
    dense_only = True
    one_node_only = True
    compresses = False

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return facts.one_node and facts.ranks > 1 and dense

    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        line = CACHE_LINE // cut.itemsize
        for start, stop in cut.spans:
            inner = (round(edge / line) * line for edge in even_bounds(start, stop, site.ranks)[1:-1])
            yield SharedMemoryReduce((start, *(min(stop, max(start, edge)) for edge in inner), stop))


register(SharedMemoryTopology())
