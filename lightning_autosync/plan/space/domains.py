"""Blocks of variables that share their choices, and the domain of each aspect of a block on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import codecs
from lightning_autosync.plan.spec import Semantics
from lightning_autosync.plan.topologies import Facts, methods
from lightning_autosync.plan.topologies import method as find_method
from lightning_autosync.workload import Variable, Workload

LARGE_SHARE = 0.08
"""Smallest share of all bytes at which a variable gets choices of its own."""


@dataclass(frozen=True)
class Block:
    """Variables that share their choices.

    Attributes:
        name: ``run0``, ``run1``, ... in backward order without names of single variables, or the name of a single
            variable.
        variables: variables of one element type, in the order in which backward computes their gradients.
        home: name of the run that the block may join: for a large dense variable the run at its position, for a run
            the previous one in backward order. None if its element type has no such run.
    """

    name: str
    variables: tuple[Variable, ...]
    home: str | None = None

    @property
    def bytes(self) -> int:
        return sum(variable.bytes for variable in self.variables)

    @property
    def dense(self) -> bool:
        return self.variables[0].kind == "dense"


def make_blocks(workload: Workload, runs: int = 4, lone: int = 6) -> tuple[Block, ...]:
    """Cut a workload into blocks: runs of small variables, single large variables and single row-wise variables.

    Each element type has at most ``runs`` runs with about equal bytes, in backward order. The ``lone`` largest
    variables with at least `LARGE_SHARE` of all bytes are blocks of their own.
    """
    order = [workload.variable(name) for name in workload.ready_order]
    dense = [variable for variable in order if variable.kind == "dense"]
    large = sorted((v for v in dense if v.bytes >= LARGE_SHARE * workload.bytes), key=lambda v: -v.bytes)[:lone]
    alone = {variable.name for variable in large}
    row_wise = [Block(variable.name, (variable,)) for variable in order if variable.kind != "dense"]
    made: list[Block] = []
    for dtype in dict.fromkeys(variable.dtype for variable in dense):
        taken = alone.union(block.name for block in (*made, *row_wise))
        free = (name for number in count(len(made)) if (name := f"run{number}") not in taken)
        made += _runs([variable for variable in dense if variable.dtype == dtype], alone, runs, free)
    return (*made, *row_wise)


def _runs(variables: Sequence[Variable], alone: set[str], runs: int, free: Iterator[str]) -> Iterator[Block]:
    """Blocks of one element type: its runs, then its large variables, which may join a run.

    ``free`` has names for the runs.
    """
    small = sum(variable.bytes for variable in variables if variable.name not in alone)
    members: list[list[Variable]] = [[] for _ in range(runs)]
    homes: dict[str, int] = {}
    seen = 0
    for variable in variables:
        place = min(runs - 1, runs * seen // small) if small else 0
        if variable.name in alone:
            homes[variable.name] = place
        else:
            members[place].append(variable)
            seen += variable.bytes
    names = {place: next(free) for place in range(runs) if members[place]}
    before: str | None = None
    for place, name in names.items():
        yield Block(name, tuple(members[place]), before)
        before = name
    for variable in variables:
        if variable.name in alone:
            yield Block(variable.name, (variable,), names.get(homes[variable.name]))


Value = str | int
Domain = tuple[Value, ...]

JOIN = "join"
"""Method of a block that travels with its home; the home may itself join another run."""
ASPECTS = ("method", "servers", "bucket", "compressor", "aggregate", "priority", "segment")
WHOLE = 0
"""Bucket without a limit: a block and all blocks that joined it make one message."""
PARTS = (2, 4, 8, 16)
"""Approximate numbers of messages into which buckets cut a block."""
SMALLEST_BUCKET = 4 * 1024
SEGMENTS = (0, 16 * 1024, 64 * 1024, 256 * 1024)
"""Bytes of a pipelined piece on trees; 0 lets the compiler choose."""


def block_domains(block: Block, cluster: ClusterSpec, semantics: Semantics) -> dict[str, Domain]:
    """The domains of a block's aspects, in the order in which they are drawn.

    The aspects are ``method`` (architecture and topology, the same for all parts of a variable), ``servers`` (the ranks
    that reduce), ``bucket`` (bytes at which a fused message closes), ``compressor``, ``aggregate`` (reduce inside a
    node first), ``priority`` and ``segment``. Aspects with a single value are left out.
    """
    facts = Facts(cluster)
    domains: dict[str, Domain] = {
        "method": _methods(block, facts),
        "servers": _servers(block, facts),
        "bucket": _buckets(block),
        "compressor": _compressors(block, semantics),
        "aggregate": (0, 1) if facts.crowded and len(cluster.nodes) > 1 else (0,),
        "priority": (0, 1),
        "segment": tuple(size for size in SEGMENTS if size < block.bytes),
    }
    return {name: domain for name, domain in domains.items() if len(domain) > 1}


def relevant(aspect: str, choice: Mapping[str, Value]) -> bool:
    """Whether an aspect can change the plan, given the block's method."""
    if aspect == "method":
        return True
    if choice["method"] == JOIN:
        return False
    topology, method = find_method(str(choice["method"]))
    if aspect == "servers":
        return method.by_servers
    if aspect == "aggregate":
        return topology.aggregates and not topology.two_level
    if aspect in ("priority", "segment"):
        return topology.segmented
    if aspect == "compressor":
        return topology.compresses
    return True


def _methods(block: Block, facts: Facts) -> Domain:
    own = (JOIN,) if block.home is not None else ()
    return own + methods(facts, block.dense)


def _servers(block: Block, facts: Facts) -> Domain:
    """Ways to place servers: one server, equal shards, or shards in proportion to the links.

    A block with fewer slices than ranks gets one server, because each shard needs at least one slice.
    """
    slices = block.variables[0].shape[0] if not block.dense else sum(variable.numel for variable in block.variables)
    if slices < facts.ranks:
        return ("least_loaded",)
    spread: Domain = ("least_loaded", "even")
    if facts.crowded and len(facts.cluster.nodes) > 1:
        spread = (*spread, "node_leaders")
    return (*spread, "bandwidth") if facts.cluster.measured else spread


def _buckets(block: Block) -> Domain:
    """The whole block, or powers of two that cut it into a few messages, none below `SMALLEST_BUCKET`."""
    if len(block.variables) == 1:
        return (WHOLE,)
    whole = 1 << (block.bytes - 1).bit_length()
    parts = [whole // count for count in PARTS if count < 2 * len(block.variables)]
    return (WHOLE, *(size for size in parts if size >= SMALLEST_BUCKET))


def _compressors(block: Block, semantics: Semantics) -> Domain:
    if semantics == "exact" or not block.dense or block.variables[0].dtype not in ("float32", "float64"):
        return ("none",)
    return tuple(name for name in codecs.names() if codecs.find(name).offered)
