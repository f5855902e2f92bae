"""From a block's choices to groups of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_autosync.cluster import ClusterSpec, pack_trees, server_shares
from lightning_autosync.plan.builders.grouping import fused_groups
from lightning_autosync.plan.space.domains import Value, relevant
from lightning_autosync.plan.spec import Group, Partition, WeightedTree
from lightning_autosync.plan.topologies import method as find_method
from lightning_autosync.workload import Variable


class Composer:
    """Makes groups on one cluster; trees and shares are worked out once."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._trees: tuple[WeightedTree, ...] | None = None
        self._shares: tuple[float, ...] | None = None

    def groups(
        self, name: str, variables: Sequence[Variable], choice: Mapping[str, Value], loads: dict[int, float]
    ) -> Iterator[Group]:
        """The messages of a block; ``loads`` are the bytes that each rank serves so far, and are added to."""
        limit = int(choice["bucket"]) or sum(variable.bytes for variable in variables) + 1
        for group in fused_groups(variables, [limit], f"{name}.", **self._aspects(choice)):
            if find_method(str(choice["method"]))[1].served:
                members = [variable for variable in variables if variable.name in group.variables]
                group = group.model_copy(update=self._served(members, str(choice["servers"]), loads))
            yield group

    def _aspects(self, choice: Mapping[str, Value]) -> dict[str, Any]:
        topology, method = find_method(str(choice["method"]))
        aspects: dict[str, Any] = {
            "topology": topology.name,
            "architecture": method.architecture,
            "compressor": choice["compressor"] if relevant("compressor", choice) else "none",
            "local_aggregation": bool(choice["aggregate"]) and relevant("aggregate", choice),
        }
        if topology.takes_trees:
            aspects["trees"] = self._packed()
        if topology.segmented:
            aspects["segment"] = int(choice["segment"]) or None
        return aspects

    def _served(self, members: Sequence[Variable], servers: str, loads: dict[int, float]) -> dict[str, Any]:
        size = sum(variable.bytes for variable in members)
        owners, shares = self._owners(servers, loads)
        slices = members[0].shape[0] if members[0].kind != "dense" else sum(v.numel for v in members)
        if len(owners) > slices:
            owners, shares = self._owners("least_loaded", loads)
        for owner, share in zip(owners, shares, strict=True):
            loads[owner] += size * share
        if len(owners) == 1:
            return {"placement": owners, "partition": None}
        even = len(set(shares)) == 1
        partition = Partition(shards=len(owners), weights=None if even else shares)
        return {"placement": owners, "partition": partition}

    def _owners(self, servers: str, loads: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ranks that reduce, and the share of each."""
        ranks = tuple(range(self._cluster.world_size))
        if servers == "bandwidth":
            if self._shares is None:
                self._shares = tuple(server_shares(self._cluster))
            return ranks, self._shares
        if servers == "even":
            chosen = ranks
        elif servers == "node_leaders":
            chosen = tuple(self._cluster.ranks_of(node)[0] for node in range(len(self._cluster.nodes)))
        else:
            chosen = (min(ranks, key=lambda rank: (loads[rank], rank)),)
        return chosen, (1 / len(chosen),) * len(chosen)

    def _packed(self) -> tuple[WeightedTree, ...]:
        if self._trees is None:
            packed = pack_trees(self._cluster).trees
            self._trees = tuple(WeightedTree(weight=tree.weight, parents=tree.parents) for tree in packed)
        return self._trees
