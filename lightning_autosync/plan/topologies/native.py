"""The backend's own collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

from lightning_autosync.plan import codecs
from lightning_autosync.plan.messages import even_bounds
from lightning_autosync.plan.schedule import AllReduce, AllToAll, Transfer
from lightning_autosync.plan.spec import Group
from lightning_autosync.plan.topologies import Facts, MessageCut, Method, Site, Topology, register
from lightning_autosync.plan.topologies.base import PARAMETER_SERVER


class Native(Topology):
    """An all-reduce; with servers an uneven all-to-all, a local sum, and an all-to-all back."""

    name = "native"
    label = "backend's all-reduce"
    encoded_as = "all_reduce"
    offers = (Method("native", place=0), Method("all_to_all", PARAMETER_SERVER, place=30))

    def words(self, architecture: str) -> str:
        return "all-to-all with servers" if architecture == PARAMETER_SERVER else self.label

    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        return method.name == "native" or (dense and facts.ranks > 1)

    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        if group.architecture == PARAMETER_SERVER:
            yield AllToAll(tuple(cut.bounds), tuple(group.placement or (0,) * group.shards))
        elif codecs.find(group.compressor.kind).sums == "decoded":
            # A backend cannot sum encoded blocks, so each rank decodes, reduces and encodes a part of the message.
            parts = [even_bounds(start, stop, site.ranks)[:-1] for start, stop in pairwise(cut.bounds)]
            yield AllToAll((*chain.from_iterable(parts), cut.bounds[-1]), tuple(range(site.ranks)) * len(parts))
        else:
            yield from (AllReduce(start, stop) for start, stop in cut.spans)


register(Native())
