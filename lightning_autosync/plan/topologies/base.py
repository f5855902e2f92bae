"""Base classes of topologies: how a message is summed over all ranks and how the sum is distributed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

from lightning_autosync.cluster import ClusterSpec, LinkGraph
from lightning_autosync.plan.messages import even_bounds
from lightning_autosync.plan.schedule import Transfer, TreeTransfer
from lightning_autosync.plan.second_roots import SecondRoots, second_roots
from lightning_autosync.plan.trees import Tree

if TYPE_CHECKING:
    from lightning_autosync.plan.spec import Group
    from lightning_autosync.workload import Variable

ALL_REDUCE: Final = "all_reduce"
PARAMETER_SERVER: Final = "parameter_server"

LARGEST_SEGMENT = 128 * 1024
"""Largest bytes of a piece: larger pieces lose the overlap of tree levels (measured on shaped links)."""
SMALLEST_SEGMENT = 32 * 1024
"""Smallest bytes of a piece: smaller pieces are dominated by the cost per message."""
PIECE_SECONDS = 1e-3
"""Seconds that a link takes for the smallest piece of trees of depth one, which have no pipeline from level to level.
The cost per piece counts on fast links (chosen after two single runs at 1 Gbit/s; other rates were not measured)."""
PIECES = 96
"""Number of pieces of a transfer within the limits above; filling the pipeline of a tree of depth d takes d pieces."""

MODES = ("all_reduce", "all_to_all", "shared_memory", "two_level", "ring", "tree", "star", "hierarchical", "packed")
"""Topologies that learned simulators distinguish; `Topology.encoded_as` maps each topology to the most similar one."""


class Method(NamedTuple):
    """A combination of topology and architecture that a plan space offers.

    Attributes:
        name: its value in the space; unique among all topologies.
        architecture: architecture of its groups.
        place: sort key in a domain. The default puts new methods last, so that existing ones keep their places.
    """

    name: str
    architecture: Literal["all_reduce", "parameter_server"] = ALL_REDUCE
    place: int = 100

    @property
    def by_servers(self) -> bool:
        """Whether servers reduce."""
        return self.architecture == PARAMETER_SERVER


@dataclass(frozen=True)
class Facts:
    """Properties of a cluster that decide which methods are worth trying."""

    cluster: ClusterSpec

    @property
    def ranks(self) -> int:
        return self.cluster.world_size

    @property
    def one_node(self) -> bool:
        return len(self.cluster.nodes) == 1

    @property
    def crowded(self) -> bool:
        """Whether any node has several ranks."""
        return any(len(self.cluster.ranks_of(node)) > 1 for node in range(len(self.cluster.nodes)))

    @property
    def levels(self) -> bool:
        """Whether there are several places (multi-device nodes or racks), and any of them has several ranks."""
        places = self.cluster.localities()
        return len(places) > 1 and any(len(place) > 1 for place in places)


@dataclass
class Site:
    """A cluster as topologies see it; caches derived data for all messages of a plan.

    Attributes:
        cluster: nodes and links.
        two_level_collectives: whether hierarchical all-reduces run as collectives in two levels.
    """

    cluster: ClusterSpec
    two_level_collectives: bool = False
    _pairs: dict[tuple[str, bool, int, int], tuple[Tree, Tree]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.cluster.world_size

    @cached_property
    def least_segment(self) -> int:
        """Smallest bytes of a piece of trees of depth one: `PIECE_SECONDS` of the slowest link, if that is known."""
        if not self.cluster.measured:
            return SMALLEST_SEGMENT
        slowest = float(LinkGraph(self.cluster).capacities.min(initial=math.inf))
        return int(min(LARGEST_SEGMENT, max(SMALLEST_SEGMENT, PIECE_SECONDS * slowest)))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node, or by rack if nodes have one device."""
        return self.cluster.localities()

    @cached_property
    def nodes(self) -> list[tuple[int, ...]]:
        """Ranks by node."""
        return [self.cluster.ranks_of(node) for node in range(len(self.cluster.nodes))]

    @cached_property
    def second_roots(self) -> SecondRoots:
        """Where trees have two roots."""
        return second_roots(self.cluster)

    def pair(self, topology: TreeTopology, group: Group, root: int, shard: int) -> tuple[Tree, Tree]:
        """The trees of a range; cached, because the many messages of a plan use few different trees."""
        key = topology.name, group.local_aggregation, root, shard
        if key not in self._pairs:
            up, down = topology.parents(self, group, root, shard)
            self._pairs[key] = make_tree(up), make_tree(down)
        return self._pairs[key]


class MessageCut(NamedTuple):
    """A message, or one of its rounds, cut into shards.

    Attributes:
        bounds: [shards + 1] elements at which shards start and end.
        itemsize: bytes per element.
        width: elements per row of a row-wise message; None for a dense one.
    """

    bounds: Sequence[int]
    itemsize: int
    width: int | None

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each non-empty shard."""
        return ((start, stop) for start, stop in pairwise(self.bounds) if stop > start)


class Topology(ABC):
    """Base class of topologies; `lightning_autosync.plan.topologies.register` makes an instance available to plans.

    Attributes:
        name: name in plans and spaces.
        label: name in pictures.
        hatch: matplotlib hatch of its messages in pictures.
        offers: methods by which plan spaces use it.
        encoded_as: most similar topology among `MODES`.
        architectures: architectures of groups that may use it.
        dense_only: whether row-wise messages cannot use it.
        rows_only: whether dense messages cannot use it.
        one_node_only: whether all ranks must be on one node.
        compresses: whether messages can be compressed.
        aggregates: whether a node can sum its own ranks' messages first (local aggregation).
        two_level: whether it always sums the messages of a node or rack first.
        segmented: whether it runs over this package's own connections, in segments and by priority.
        takes_trees: whether a group may specify its trees.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    hatch: ClassVar[str] = ""
    encoded_as: ClassVar[str]
    offers: ClassVar[tuple[Method, ...]] = ()
    architectures: ClassVar[tuple[str, ...]] = (ALL_REDUCE, PARAMETER_SERVER)
    dense_only: ClassVar[bool] = False
    rows_only: ClassVar[bool] = False
    one_node_only: ClassVar[bool] = False
    compresses: ClassVar[bool] = True
    aggregates: ClassVar[bool] = False
    two_level: ClassVar[bool] = False
    segmented: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = False

    def words(self, architecture: str) -> str:
        """Its name in pictures for groups with this architecture."""
        return self.label if architecture == ALL_REDUCE else f"servers, {self.name}"

    @abstractmethod
    def pays(self, method: Method, facts: Facts, dense: bool) -> bool:
        """Whether one of its methods is worth trying on a cluster, for dense or row-wise messages."""

    @abstractmethod
    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        """The transfers of all shards, in the order of their elements."""

    @property
    def everywhere(self) -> bool:
        """Whether any group can use it on any cluster."""
        return not (self.dense_only or self.rows_only or self.one_node_only)

    def check(self, group: Group) -> None:
        """Check that a group can use it.

        Raises:
            ValueError: it cannot; the message names the field.
        """
        if group.architecture not in self.architectures:
            allowed = " or ".join(f"'{architecture}'" for architecture in self.architectures)
            raise ValueError(
                f"topology: '{self.name}' does not support '{group.architecture}'; architecture must be {allowed}"
            )
        if group.compressor.kind != "none" and not self.compresses:
            raise ValueError(f"topology: '{self.name}' does not support compression; compressor must be 'none'")

    def check_site(self, site: Site, first: Variable, rows: int) -> None:
        """Check that it suits a cluster and a message.

        Args:
            site: the cluster.
            first: first variable of the message.
            rows: number of rows of a row-wise message; 0 for a dense one.

        Raises:
            ValueError: it does not; the message names the field.
        """
        if rows and self.dense_only:
            raise ValueError(
                f"topology: '{self.name}' takes dense gradients only, but '{first.name}' has {first.kind} gradients; "
                "choose another topology for it"
            )
        if not rows and self.rows_only:
            raise ValueError(
                f"topology: '{self.name}' takes rows only, but '{first.name}' has dense gradients; choose another "
                "topology for it"
            )
        nodes = len({*site.cluster.rank_nodes})
        if nodes > 1 and self.one_node_only:
            raise ValueError(
                f"topology: '{self.name}' needs all ranks on one node, but cluster '{site.cluster.name}' has them on "
                f"{nodes} nodes"
            )


class TreeTopology(Topology):
    """Shards are reduced along one tree and broadcast along another with the same root."""

    segmented = True

    @abstractmethod
    def parents(self, site: Site, group: Group, root: int, shard: int) -> tuple[dict[int, int], dict[int, int]]:
        """The parent of each rank in the reduce tree to ``root`` and in the broadcast tree; -1 for the root itself.

        ``shard`` distinguishes shards with the same root, so that their trees can spread the work.
        """

    def transfers(self, group: Group, cut: MessageCut, site: Site) -> Iterator[Transfer]:
        owners = group.placement or (0,) * group.shards
        for shard, (start, stop) in enumerate(pairwise(cut.bounds)):
            root = owners[shard] if group.architecture == PARAMETER_SERVER else None
            for lower, upper, reduce, broadcast in self.ranges(group, shard, root, (start, stop), cut.width or 1, site):
                if upper > lower:
                    least = site.least_segment if max(reduce.depth, broadcast.depth) == 1 else SMALLEST_SEGMENT
                    segment = segment_elements(group, upper - lower, cut.itemsize, least)
                    # Both roots would encode their sums, and rows do not travel in pieces.
                    plain = group.compressor.kind == "none" and cut.width is None
                    second = site.second_roots.of(reduce, broadcast) if plain else -1
                    yield TreeTransfer(lower, upper, reduce, broadcast, segment, second)

    def ranges(
        self, group: Group, shard: int, root: int | None, bounds: tuple[int, int], unit: int, site: Site
    ) -> Iterator[tuple[int, int, Tree, Tree]]:
        """The parts of a shard: start, stop, reduce tree and broadcast tree of each.

        Args:
            group: group of the message.
            shard: index of the shard.
            root: rank that reduces the shard; None lets each rank reduce a part.
            bounds: start and stop of the shard, in elements.
            unit: number of elements; parts are cut at multiples of it.
            site: the cluster.
        """
        start, stop = bounds
        if root is not None:
            yield start, stop, *site.pair(self, group, root, shard)
            return
        edges = even_bounds(0, (stop - start) // unit, site.ranks)
        for rank, (lower, upper) in enumerate(pairwise(edges)):
            yield start + unit * lower, start + unit * upper, *site.pair(self, group, rank, shard)


def leaders_and_members(places: Sequence[Sequence[int]], root: int, rotation: int) -> tuple[list[int], dict[int, int]]:
    """One leader per place, and the leader of each other rank as its parent; the root leads its own place.

    ``rotation`` shifts which rank of a place leads, so that different shards load different ranks.
    """
    seat = rotation + next(ranks.index(root) for ranks in places if root in ranks)
    leaders = [root if root in ranks else ranks[seat % len(ranks)] for ranks in places]
    members = {rank: leader for leader, ranks in zip(leaders, places, strict=True) for rank in ranks if rank != leader}
    return leaders, members


def leading(site: Site, group: Group, root: int, shard: int) -> tuple[list[int], dict[int, int]]:
    """The ranks that take part in the exchange, and the parents of the others: the leaders on their nodes."""
    if group.local_aggregation:
        return leaders_and_members(site.nodes, root, shard)
    return list(range(site.ranks)), {}


def segment_elements(group: Group, numel: int, itemsize: int, least: int) -> int:
    """Number of elements of a pipelined piece, which has ``least`` bytes or more if the group says nothing else."""
    size = group.segment or min(LARGEST_SEGMENT, max(least, numel * itemsize // PIECES))
    return max(1, int(size) // itemsize)


def make_tree(parents: dict[int, int]) -> Tree:
    return cached_tree(tuple(parents[rank] for rank in range(len(parents))))


@lru_cache(maxsize=4096)
def cached_tree(parents: tuple[int, ...], interface: int = 0) -> Tree:
    """The tree with these parents; cached, because plans for one cluster use few different trees."""
    return Tree(parents, interface)
