"""`SyncPlan`: how every variable of a model is synchronized, as a document.

The aspects are AutoSync's (architecture, partition, placement, merging, compression; NeurIPS 2020), plus topology,
local aggregation and wire priority.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_serializer,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import Self

from lightning_autosync.cluster import Bytes
from lightning_autosync.cluster.spec import MOST_RANKS
from lightning_autosync.documents import LONGEST, Count, Document, Index, Integer, Record, digest, unknown_name
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan.trees import check_parents

Architecture = Literal["all_reduce", "parameter_server"]


class _Registered:
    """Validates a name against a registry of this package; the JSON schema lists the names registered at that time."""

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def names(self) -> tuple[str, ...]:
        # Imported late, because the registries' modules import this one.
        found: tuple[str, ...] = import_module(f"lightning_autosync.plan.{self._registry}").names()
        return found

    def check(self, name: str) -> str:
        if name not in self.names():
            raise ValueError(f"'{name}' is {unknown_name(name, self.names())}")
        return name

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(self.names())}


_TOPOLOGIES, _CODECS = _Registered("topologies"), _Registered("codecs")
TopologyName = Annotated[str, AfterValidator(_TOPOLOGIES.check), _TOPOLOGIES]
CodecName = Annotated[str, AfterValidator(_CODECS.check), _CODECS]
Semantics = Literal["exact", "compressed", "relaxed"]

MOST_SHARDS = 65536
"""Largest number of shards of a message."""
MOST_WEIGHT = 1e15
"""Largest weight of a shard or a tree."""

SEMANTICS: tuple[Semantics, ...] = ("exact", "compressed", "relaxed")


def _pairs(options: Any) -> Any:
    """A mapping as sorted pairs, so that a compressor can be hashed."""
    return tuple(sorted(options.items())) if isinstance(options, Mapping) else options


_Option = bool | int | float | str
_Options = Annotated[tuple[tuple[str, _Option], ...], BeforeValidator(_pairs), WithJsonSchema({"type": "object"})]


class Compressor(Record):
    """Compression of a message; in YAML its kind alone, or a mapping.

    Attributes:
        kind: ``none``, the casts ``fp16`` and ``bf16``, ``int8`` with one scale per block, ``topk`` (the largest
            magnitudes), or ``powersgd`` (low rank; Vogels et al., 2019).
        error_feedback: whether the compression error is added to the next step's gradient (Karimireddy et al., 2019).
        ratio: share of the elements that ``topk`` keeps.
        rank: rank of ``powersgd``.
        block: number of elements that share a scale in ``int8``.
        options: settings of another package's codec (`CodecFormat.options`), by name; a mapping in files.
    """

    kind: CodecName = "none"
    error_feedback: bool = True
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    rank: Annotated[Count, Field(le=MOST_SHARDS)] = 2
    block: Annotated[Count, Field(le=2**31)] = 256
    options: _Options = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        kinds = {"type": "string", "enum": list(_CODECS.names())}
        return {"anyOf": [kinds, handler.resolve_ref_schema(schema)]}

    @model_validator(mode="before")
    @classmethod
    def _accept_kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        from lightning_autosync.plan import codecs

        codec = codecs.find(self.kind)
        for name in codecs.SETTINGS:
            if name not in codec.settings and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: compressor '{self.kind}' does not use it; leave it out")
        known = codec.options
        if known is None and self.options:
            raise ValueError(f"options: compressor '{self.kind}' takes no options; leave them out")
        complete = known(**dict(self.options)).model_dump(mode="json") if known is not None else {}
        if complete != dict(self.options):
            object.__setattr__(self, "options", _pairs(complete))
        return self

    @model_serializer(mode="wrap")
    def _leave_out_no_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty options: older files, fingerprints and checkpoints do not have the field."""
        fields: dict[str, Any] = handler(self)
        if self.options and "options" in fields:
            return fields | {"options": dict(self.options)}
        return {name: value for name, value in fields.items() if name != "options"}


class Partition(Record):
    """The partition of a message into shards.

    Attributes:
        axis: axis along which the message's only variable is cut, between slices. None cuts the message as one flat
            run of elements; a row-wise variable is always cut between rows.
        shards: number of shards, of equal size up to one slice or element if ``weights`` is None.
        weights: [shards] relative sizes; a shard with weight 0 is empty.
    """

    axis: Index | None = None
    shards: Annotated[Count, Field(le=MOST_SHARDS)]
    weights: tuple[Annotated[float, Field(ge=0, le=MOST_WEIGHT)], ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights is not None:
            if len(self.weights) != self.shards:
                raise ValueError(f"weights: expected one for each of {self.shards} shards, got {len(self.weights)}")
            if not sum(self.weights) > 0:
                raise ValueError("weights: at least one must be above zero")
        return self


def _checked(parents: tuple[int, ...]) -> tuple[int, ...]:
    check_parents(parents)
    return parents


_Parents = Annotated[tuple[Annotated[Integer, Field(ge=-1)], ...], AfterValidator(_checked)]


class WeightedTree(Record):
    """A spanning tree, or a pair of them, that carries a share of a ``packed`` message in proportion to ``weight``.

    Attributes:
        weight: relative share.
        parents: [ranks] parent of each rank, -1 at the root, in the tree that reduces.
        broadcast: the same of the tree that broadcasts, with the same root; None for the tree that reduces.
        interface: interface of each node over which its ranks connect to their neighbours, 0 for the first
            (`lightning_autosync.cluster.Node`).
    """

    weight: Annotated[float, Field(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)]
    parents: _Parents
    broadcast: _Parents | None = None
    interface: Index = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.broadcast is not None:
            ranks = len(self.parents)
            if len(self.broadcast) != ranks:
                raise ValueError(f"broadcast: expected {ranks} ranks as in parents, got {len(self.broadcast)}")
            root, start = self.parents.index(-1), self.broadcast.index(-1)
            if start != root:
                raise ValueError(f"broadcast: its root is rank {start}; it must be rank {root}, the root in parents")
        return self


class Group(Record):
    """Variables that are synchronized together as one message, and how.

    Attributes:
        name: name, unique in the plan.
        variables: names as in ``named_parameters()``.
        architecture: ``all_reduce`` (every rank reduces a part) or ``parameter_server`` (the ranks of ``placement``
            reduce).
        topology: a name in `lightning_autosync.plan.topologies`; ``native`` is the backend's own collective.
        partition: how the message is cut into shards; None leaves it whole.
        placement: [shards] rank that reduces each shard, for ``parameter_server``; None puts all on rank 0.
        trees: trees or pairs of trees, and their weights, for ``packed``; None derives them from the cluster's links.
        compressor: compression of the message.
        local_aggregation: whether the ranks of a node are first reduced to one message.
        priority: priority among messages that compete for the wire, higher first; collectives keep the plan's order.
        segment: bytes of a pipelined piece on trees; None lets the compiler choose.
    """

    name: Annotated[str, Field(min_length=1)]
    variables: Annotated[tuple[str, ...], Field(min_length=1)]
    architecture: Architecture = "all_reduce"
    topology: TopologyName = "native"
    partition: Partition | None = None
    placement: tuple[Index, ...] | None = None
    trees: Annotated[tuple[WeightedTree, ...], Field(min_length=1)] | None = None
    compressor: Compressor = Compressor()
    local_aggregation: bool = False
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31)] = 0
    segment: Annotated[Bytes, Field(ge=1024)] | None = None

    @property
    def shards(self) -> int:
        return self.partition.shards if self.partition else 1

    @field_serializer("compressor")
    def _shorten(self, compressor: Compressor) -> str | dict[str, Any]:
        fields = compressor.model_dump(exclude_defaults=True)
        return compressor.kind if fields.keys() <= {"kind"} else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.placement is not None:
            if self.architecture != "parameter_server":
                raise ValueError("placement: allowed with architecture 'parameter_server' only; leave it out")
            if len(self.placement) != self.shards:
                raise ValueError(
                    f"placement: expected one rank for each of {self.shards} shards, got {len(self.placement)}"
                )
        if self.partition and self.partition.axis is not None and len(self.variables) > 1:
            raise ValueError("partition.axis: not allowed with several variables, which are cut as one; leave it out")
        self._check_registered()
        return self

    def _check_registered(self) -> None:
        from lightning_autosync.plan import codecs, topologies

        codecs.find(self.compressor.kind).check(self)
        topology = topologies.find(self.topology)
        topology.check(self)
        if self.trees is not None and not topology.takes_trees:
            takers = [name for name in topologies.names() if topologies.find(name).takes_trees]
            raise ValueError(f"trees: only topology '{', '.join(takers)}' takes trees, not '{self.topology}'")
        if self.segment is not None and not topology.segmented:
            allowed = [name for name in topologies.names() if topologies.find(name).segmented]
            raise ValueError(f"segment: not allowed with topology '{self.topology}'; allowed with {', '.join(allowed)}")
        if self.local_aggregation and not topology.aggregates:
            allowed = [name for name in topologies.names() if topologies.find(name).aggregates]
            raise ValueError(
                f"local_aggregation: not allowed with topology '{self.topology}'; allowed with {', '.join(allowed)}"
            )


OuterKind = Literal["averaging", "easgd", "bmuf", "slowmo", "diloco"]


class Consistency(Record):
    """The consistency of the replicas.

    Attributes:
        mode: ``synchronous`` (like DDP), ``bounded_staleness``, ``asynchronous``, ``partial_reduce`` or ``periodic``.
        served: whether the servers of a ``synchronous`` plan also keep their shards' parameters and optimizer state and
            run the optimizer step. In the other modes with servers they always do.
        staleness: largest number of steps that a replica may run ahead, for ``bounded_staleness``.
        group_size: number of ranks in a partial reduce (P).
        weighting: weights of a partial reduce, ``constant`` or ``dynamic`` (staleness-aware).
        period: steps between averages, for ``periodic``.
        outer: outer update of ``periodic``.
        wait: timeout in seconds after which a partial reduce proceeds with the ranks that are ready; None always waits
            for ``group_size`` ranks.
        isolation: steps, on average over the ranks, within which partial reduces must connect all ranks; None means 10.
        momentum: whether the optimizer's running averages stay ``local`` or are averaged with the parameters
            (``average``); None means ``local``.
        warmup: number of first steps after each of which ``periodic`` averages (post-local SGD; Lin et al., 2020); None
            means 0.
        fragments: number of parts of the model that ``periodic`` averages in turn, each once per period (Streaming
            DiLoCo; Douillard et al., 2025); None means 1.
        overhead: largest share of the time for averages. If set, the period adapts and starts at ``period``.
        outer_lr: step size of the outer update. None means 1 for ``bmuf`` (block learning rate) and ``slowmo``, 0.7
            for ``diloco``.
        outer_momentum: momentum of the outer update. None means 1 - 1 / ranks for ``bmuf``, 0.5 for ``slowmo``, 0.9
            for ``diloco``.
        alpha: fraction of their distance by which a replica and the centre of ``easgd`` move towards each other at an
            average; None means 0.9 / ranks.
    """

    mode: Literal["synchronous", "bounded_staleness", "asynchronous", "partial_reduce", "periodic"] = "synchronous"
    served: bool | None = None
    staleness: Index | None = None
    group_size: Annotated[Integer, Field(ge=2)] | None = None
    weighting: Literal["constant", "dynamic"] | None = None
    period: Count | None = None
    outer: OuterKind | None = None
    wait: Annotated[float, Field(ge=0, le=LONGEST)] | None = None
    isolation: Count | None = None
    momentum: Literal["local", "average"] | None = None
    warmup: Index | None = None
    fragments: Count | None = None
    overhead: Annotated[float, Field(gt=0, lt=1)] | None = None
    outer_lr: Annotated[float, Field(gt=0, le=1e6)] | None = None
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    alpha: Annotated[float, Field(gt=0, le=1)] | None = None

    _NEEDED: ClassVar[dict[str, tuple[str, ...]]] = {
        "synchronous": (),
        "bounded_staleness": ("staleness",),
        "asynchronous": (),
        "partial_reduce": ("group_size", "weighting"),
        "periodic": ("period", "outer"),
    }
    _OPTIONAL: ClassVar[dict[str, tuple[str, ...]]] = {
        "synchronous": ("served",),
        "partial_reduce": ("wait", "isolation", "momentum"),
        "periodic": ("momentum", "warmup", "fragments", "overhead", "outer_lr", "outer_momentum", "alpha"),
    }
    _OUTER: ClassVar[dict[str, tuple[OuterKind, ...]]] = {
        "outer_lr": ("bmuf", "slowmo", "diloco"),
        "outer_momentum": ("bmuf", "slowmo", "diloco"),
        "alpha": ("easgd",),
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = self._NEEDED[self.mode]
        allowed = needed + self._OPTIONAL.get(self.mode, ())
        given = {name for name, value in self if name != "mode" and value is not None}
        if given - set(allowed) and "mode" not in self.model_fields_set:
            modes = ", ".join(mode for mode in self._NEEDED if mode != "synchronous")
            raise ValueError(f"mode: missing, but {', '.join(sorted(given))} given; set mode to one of {modes}")
        for name in sorted(given - set(allowed)):
            others = ", ".join(allowed) or "no other field"
            raise ValueError(f"{name}: not allowed with mode '{self.mode}'; allowed: {others}")
        for name in needed:
            if name not in given:
                raise ValueError(f"{name}: missing; mode '{self.mode}' needs {' and '.join(needed)}")
        for name, kinds in self._OUTER.items():
            if name in given and self.outer not in kinds:
                raise ValueError(f"{name}: not allowed with outer '{self.outer}'; allowed with {', '.join(kinds)}")
        if self.fragments and self.period and self.fragments > self.period:
            raise ValueError(f"fragments: {self.fragments} is above period {self.period}; a step averages at most one")
        if self.overhead is not None and (self.fragments or 1) > 1:
            raise ValueError("overhead: not allowed with fragments, which need a fixed period")
        return self


class SyncPlan(Document):
    """How a model's variables are synchronized among ``world_size`` ranks.

    Attributes:
        workload: fingerprint of the variables (names and shapes) for which the plan was made; None skips the check.
        world_size: number of ranks that train.
        servers: number of server-only processes, which have the ranks from ``world_size`` on and may be used in
            placements. Allowed only if servers update the parameters.
        consistency: consistency of the replicas.
        waits: whether steps wait for all gradients at the end of the backward pass, also with ``overlap="step"``.
        groups: the messages, in the order in which collectives are launched.
    """

    FORMAT: ClassVar[str] = "autosync-plan/1"
    ERROR: ClassVar[type[DocumentError]] = PlanError

    workload: str | None = None
    world_size: Annotated[Count, Field(le=MOST_RANKS)]
    servers: Annotated[Index, Field(le=MOST_RANKS)] = 0
    consistency: Consistency = Consistency()
    waits: bool = False
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]

    @property
    def has_schedule(self) -> bool:
        """Whether gradients follow a compiled schedule; otherwise replicas communicate whenever they are ready."""
        return self.consistency.mode == "synchronous" and not self.consistency.served

    @property
    def semantics(self) -> Semantics:
        """``exact`` (DDP's sums up to floating-point order), ``compressed``, or ``relaxed``."""
        if self.consistency.mode != "synchronous":
            return "relaxed"
        lossy = any(group.compressor.kind != "none" for group in self.groups)
        return "compressed" if lossy else "exact"

    def describe(self, workload: Any = None) -> str:
        """The plan as a text table, with sizes if its workload is given."""
        from lightning_autosync.plan.describe import plan_table

        return plan_table(self, workload)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names: set[str] = set()
        owner: dict[str, str] = {}
        for index, group in enumerate(self.groups):
            where = f"groups[{index}]"
            if group.name in names:
                raise ValueError(f"{where}.name: '{group.name}' is used twice")
            names.add(group.name)
            for variable in group.variables:
                if variable in owner:
                    raise ValueError(f"{where}.variables: '{variable}' is already in group '{owner[variable]}'")
                owner[variable] = group.name
            for shard, rank in enumerate(group.placement or ()):
                if rank >= self.world_size + self.servers:
                    servers = f", servers is {self.servers}" if self.servers else ""
                    raise ValueError(
                        f"{where}.placement[{shard}]: rank {rank} is out of range; world_size is {self.world_size}"
                        f"{servers}"
                    )
            for number, tree in enumerate(group.trees or ()):
                if len(tree.parents) != self.world_size:
                    raise ValueError(
                        f"{where}.trees[{number}].parents: expected one for each of {self.world_size} ranks, "
                        f"got {len(tree.parents)}"
                    )
        if self.waits and not self.has_schedule:
            raise ValueError("waits: allowed only in synchronous plans without `served`; leave it out")
        self._check_consistency()
        return self

    def _check_consistency(self) -> None:
        group_size, alpha = self.consistency.group_size, self.consistency.alpha
        if group_size is not None and group_size > self.world_size:
            raise ValueError(f"consistency.group_size: {group_size} is above world_size {self.world_size}")
        # An average multiplies the centre's distance to the replicas' mean by 1 - (ranks + 1) alpha. It shrinks only
        # if that factor is above -1.
        if alpha is not None and alpha * (self.world_size + 1) >= 2:
            raise ValueError(
                f"consistency.alpha: {alpha:g} makes the centre of {self.world_size} replicas diverge; "
                f"allowed: below {2 / (self.world_size + 1):.3g}, 2 / (ranks + 1)"
            )


def signature(plan: SyncPlan) -> str:
    """A digest of a plan without the names of its groups: plans that differ in these names only have the same one."""
    groups = [group.model_dump(mode="json", exclude={"name"}, exclude_defaults=True) for group in plan.groups]
    return digest([plan.consistency.model_dump(mode="json"), groups])
