"""What each aspect of a block may be on a cluster: AutoSync's knowledge constraints as finite domains."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan.space.blocks import Block
from lightning_autosync.plan.spec import CompressorKind, Semantics
from lightning_autosync.plan.topologies import Facts, methods
from lightning_autosync.plan.topologies import method as find_method

Value = str | int
Domain = tuple[Value, ...]

JOIN = "join"
"""Method of a block that travels with its home, which may join another in turn."""
ASPECTS = ("method", "servers", "bucket", "compressor", "aggregate", "priority", "segment")
WHOLE = 0
"""Bucket without a limit: the block and all that joined it make one message."""
PARTS = (2, 4, 8, 16)
"""Into how many messages buckets cut a block, about."""
SMALLEST_BUCKET = 4 * 1024
SEGMENTS = (0, 16 * 1024, 64 * 1024, 256 * 1024)
"""Bytes of a pipelined piece; 0 lets the compiler choose."""


def block_domains(block: Block, cluster: ClusterSpec, semantics: Semantics) -> dict[str, Domain]:
    """The domains of a block's aspects, in the order in which they are drawn.

    ``method`` (architecture and topology together: one for all parts of a variable), ``servers`` (who reduces),
    ``bucket`` (bytes at which a fused message closes), ``compressor``, ``aggregate`` (inside a node first),
    ``priority``, ``segment``. Aspects with one value are left out.
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
    """Whether an aspect changes the plan, given the block's method."""
    if aspect == "method":
        return True
    if choice["method"] == JOIN:
        return False
    topology, method = find_method(str(choice["method"]))
    if aspect == "servers":
        return method.served
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
    """One server, or equal shards, or shards that follow the links: never more shards than there are slices."""
    slices = block.variables[0].shape[0] if not block.dense else sum(variable.numel for variable in block.variables)
    if slices < facts.ranks:
        return ("least_loaded",)
    spread: Domain = ("least_loaded", "even")
    if facts.crowded and len(facts.cluster.nodes) > 1:
        spread = (*spread, "node_leaders")
    return (*spread, "bandwidth") if facts.cluster.measured else spread


def _buckets(block: Block) -> Domain:
    """The whole block, or powers of two that cut it into a few messages of some size."""
    if len(block.variables) == 1:
        return (WHOLE,)
    whole = 1 << (block.bytes - 1).bit_length()
    parts = [whole // count for count in PARTS if count < 2 * len(block.variables)]
    return (WHOLE, *(size for size in parts if size >= SMALLEST_BUCKET))


def _compressors(block: Block, semantics: Semantics) -> Domain:
    if semantics == "exact" or not block.dense or block.variables[0].dtype not in ("float32", "float64"):
        return ("none",)
    kinds: tuple[CompressorKind, ...] = ("none", "bf16", "int8", "topk", "powersgd")
    return kinds
