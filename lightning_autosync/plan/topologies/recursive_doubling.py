"""Exchanges of whole sums between pairs of ranks at distances 1, 2, 4 and so on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import ClassVar

from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import Transfer
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, MessageCut, Method, Site, Topology, register
from lightning_autosync.plan.topologies.base import ALL_REDUCE, LARGEST_SEGMENT, segment_elements


class RecursiveDoubling(Topology):
    """Each rank has the sum after log2(n) exchanges, the fewest possible. So it suits the smallest messages.

    Ranks of a node or rack meet first, where these have equal numbers of ranks that are powers of two.

    Attributes:
        halves: as in `PairwiseReduce`.
    """

    name = "recursive_doubling"
    label = "recursive doubling"
    hatch = "++"
    encoded_as = "tree"
    offers: ClassVar[tuple[Method, ...]] = (Method("recursive_doubling"),)
    architectures = (ALL_REDUCE,)
    dense_only = True
    compresses = False
    segmented = True
    halves: ClassVar[bool] = False

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return dense and facts.ranks > 7  # among fewer, the replay says, other plans are at most 8% slower

    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        order = tuple(chain.from_iterable(site.places))
        for start, stop in cut.spans:
            segment = segment_elements(group, stop - start, cut.itemsize, LARGEST_SEGMENT)
            yield PairwiseReduce(start, stop, segment, order, self.halves)


register(RecursiveDoubling())
