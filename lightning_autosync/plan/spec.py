"""`SyncPlan`: how every variable of a model is synchronized, as data.

The aspects are AutoSync's (architecture, partition, placement, merging, compression; NeurIPS 2020),
with topology, local aggregation and wire priority beside them.
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
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import Self

from lightning_autosync.cluster import Bytes
from lightning_autosync.cluster.spec import MOST_RANKS
from lightning_autosync.documents import LONGEST, Count, Document, Index, Integer, Record, digest
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan.trees import check_parents

Architecture = Literal["all_reduce", "parameter_server"]


class _Registered:
    """A name in a registry of this package, whose modules import this one.

    The JSON schema lists the names that are registered where it is written.
    """

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def names(self) -> tuple[str, ...]:
        found: tuple[str, ...] = import_module(f"lightning_autosync.plan.{self._registry}").names()
        return found

    def check(self, name: str) -> str:
        if name not in self.names():
            raise ValueError(f"'{name}' is not known; registered are {', '.join(self.names())}")
        return name

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(self.names())}


_TOPOLOGIES, _CODECS = _Registered("topologies"), _Registered("codecs")
TopologyName = Annotated[str, AfterValidator(_TOPOLOGIES.check), _TOPOLOGIES]
CodecName = Annotated[str, AfterValidator(_CODECS.check), _CODECS]
Semantics = Literal["exact", "compressed", "relaxed"]

MOST_SHARDS = 65536
"""Of a message."""
MOST_WEIGHT = 1e15
"""Of a shard or a tree, relative to the others."""

SEMANTICS: tuple[Semantics, ...] = ("exact", "compressed", "relaxed")


def _pairs(options: Any) -> Any:
    """A mapping as pairs, by which a compressor can be hashed."""
    return tuple(sorted(options.items())) if isinstance(options, Mapping) else options


_Option = bool | int | float | str
_Options = Annotated[tuple[tuple[str, _Option], ...], BeforeValidator(_pairs), WithJsonSchema({"type": "object"})]


class Compressor(Record):
    """What happens to a message before it travels; in YAML just its kind, or a mapping.

    Attributes:
        kind: ``none``, casts ``fp16`` and ``bf16``, ``int8`` with one scale a block, ``topk`` (the largest
            magnitudes), ``powersgd`` (low rank; Vogels et al., 2019).
        error_feedback: what compression loses is added to the next step's gradient (Karimireddy et al., 2019).
        ratio: share of the elements that ``topk`` keeps.
        rank: rank of ``powersgd``.
        block: elements that share a scale in ``int8``.
        options: settings of a codec of another package (`CodecFormat.options`), by name; a mapping in files.
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

        known = codecs.find(self.kind).options
        if known is None and self.options:
            raise ValueError(f"options: '{self.kind}' takes none")
        complete = known(**dict(self.options)).model_dump(mode="json") if known is not None else {}
        if complete != dict(self.options):
            object.__setattr__(self, "options", _pairs(complete))
        return self

    @model_serializer(mode="wrap")
    def _leave_out_no_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As files, fingerprints and checkpoints had it before there were options."""
        fields: dict[str, Any] = handler(self)
        if self.options and "options" in fields:
            return fields | {"options": dict(self.options)}
        return {name: value for name, value in fields.items() if name != "options"}


class Partition(Record):
    """One message cut into shards.

    Attributes:
        axis: the axis of a lone variable that is cut, between slices; left out, the message is cut as one flat run
            of elements (a row-wise variable always between rows).
        shards: number of pieces, as equal as may be unless ``weights`` says otherwise.
        weights: relative sizes, one a shard; zero leaves a shard empty.
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


class WeightedTree(Record):
    """A spanning tree that carries ``weight`` of a ``packed`` message; ``parents[r]`` is -1 at the root."""

    weight: Annotated[float, Field(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)]
    parents: tuple[Annotated[Integer, Field(ge=-1)], ...]

    @field_validator("parents")
    @classmethod
    def _check_parents(cls, parents: tuple[int, ...]) -> tuple[int, ...]:
        check_parents(parents)
        return parents


class Group(Record):
    """Variables that travel together as one message, and how.

    Attributes:
        name: unique in the plan.
        variables: names as in ``named_parameters()``.
        architecture: ``all_reduce`` (every rank reduces a part) or ``parameter_server`` (``placement`` says who).
        topology: how the message travels; one of `lightning_autosync.plan.topologies`. ``native`` is the backend's own
            collective.
        partition: how the message is cut; None leaves it whole.
        placement: for ``parameter_server``, the rank that reduces each shard; None puts all on rank 0.
        trees: for ``packed``, the trees and their shares; None derives them from the cluster's links.
        compressor: what happens to the message before it travels.
        local_aggregation: ranks of one node are reduced to one message first.
        priority: higher goes first on the wire where messages compete; collectives keep the plan's order.
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
                raise ValueError("placement: only parameter_server takes one; all_reduce places a part on every rank")
            if len(self.placement) != self.shards:
                raise ValueError(
                    f"placement: expected one rank for each of {self.shards} shards, got {len(self.placement)}"
                )
        if self.partition and self.partition.axis is not None and len(self.variables) > 1:
            raise ValueError("partition.axis: several variables are cut as one flat message; leave it out")
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
        if self.local_aggregation and not topology.aggregates:
            allowed = [name for name in topologies.names() if topologies.find(name).aggregates]
            raise ValueError(
                f"local_aggregation: not with topology '{self.topology}'; allowed with {', '.join(allowed)}"
            )


OuterKind = Literal["averaging", "easgd", "bmuf", "slowmo", "diloco"]


class Consistency(Record):
    """How closely replicas keep in step.

    Attributes:
        mode: ``synchronous`` (as DDP), ``bounded_staleness``, ``asynchronous``, ``partial_reduce``, ``periodic``.
        served: whether the ranks on which a ``synchronous`` plan places shards also keep the parameters and the
            optimizer's state there, and make its steps; with the other modes that have servers they always do.
        staleness: steps that a replica may run ahead, for ``bounded_staleness``.
        group_size: ranks in a partial reduce (P).
        weighting: ``constant`` or ``dynamic`` (staleness-aware) weights of a partial reduce.
        period: steps between averages, for ``periodic``.
        outer: the outer update of ``periodic``.
        wait: seconds after which a partial reduce goes on with the ranks that are there; None waits for ``group_size``.
        isolation: steps, on average over the ranks, within which partial reduces connect all ranks; None means 10.
        momentum: whether the optimizer's running averages stay ``local`` (also if None) or are averaged as the
            parameters are (``average``).
        warmup: first steps of ``periodic`` that average each time (post-local SGD; Lin et al., 2020); None means 0.
        fragments: parts of the model that ``periodic`` averages in turn, each once a period (Streaming DiLoCo;
            Douillard et al., 2025); None means 1.
        overhead: share of the time that averages may take; ``period`` is then where an adapting period begins.
        outer_lr: step size of the outer update: for ``bmuf`` (block learning rate) and ``slowmo`` 1 if None, for
            ``diloco`` 0.7.
        outer_momentum: for ``bmuf`` 1 - 1 / ranks if None, for ``slowmo`` 0.5, for ``diloco`` 0.9.
        alpha: share of the way that a replica and the centre of ``easgd`` move towards each other at an average; None
            means 0.9 / ranks.
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
            raise ValueError(f"mode: missing; {', '.join(sorted(given))} go with one of {modes}")
        for name in sorted(given - set(allowed)):
            raise ValueError(f"{name}: mode '{self.mode}' takes {', '.join(allowed) or 'no further field'}")
        for name in needed:
            if name not in given:
                raise ValueError(f"{name}: missing; mode '{self.mode}' needs {' and '.join(needed)}")
        for name, kinds in self._OUTER.items():
            if name in given and self.outer not in kinds:
                raise ValueError(f"{name}: outer '{self.outer}' takes none; allowed with {', '.join(kinds)}")
        if self.fragments and self.period and self.fragments > self.period:
            raise ValueError(f"fragments: {self.fragments} is above period {self.period}; one is averaged at a time")
        if self.overhead is not None and (self.fragments or 1) > 1:
            raise ValueError("overhead: not with fragments, which need a fixed period")
        return self


class SyncPlan(Document):
    """How a model's variables are synchronized among ``world_size`` ranks.

    Attributes:
        workload: fingerprint of the variables (names and shapes) that it was made for; None skips the check.
        world_size: number of ranks.
        servers: processes beside them that train nothing and may be placed on, as ranks from ``world_size`` on; only
            where servers update the parameters.
        consistency: how closely replicas keep in step.
        groups: the messages, in the order in which collectives are launched.
    """

    FORMAT: ClassVar[str] = "autosync-plan/1"
    ERROR: ClassVar[type[DocumentError]] = PlanError

    workload: str | None = None
    world_size: Annotated[Count, Field(le=MOST_RANKS)]
    servers: Annotated[Index, Field(le=MOST_RANKS)] = 0
    consistency: Consistency = Consistency()
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]

    @property
    def has_schedule(self) -> bool:
        """Whether gradients travel as a compiled schedule says; else replicas talk as they are ready."""
        return self.consistency.mode == "synchronous" and not self.consistency.served

    @property
    def semantics(self) -> Semantics:
        """``exact`` (DDP's sums up to floating-point order), ``compressed``, or ``relaxed``."""
        if self.consistency.mode != "synchronous":
            return "relaxed"
        lossy = any(group.compressor.kind != "none" for group in self.groups)
        return "compressed" if lossy else "exact"

    def describe(self, workload: Any = None) -> str:
        """The plan as a table that a person reads; with its workload, sizes too."""
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
        self._check_consistency()
        return self

    def _check_consistency(self) -> None:
        group_size, alpha = self.consistency.group_size, self.consistency.alpha
        if group_size is not None and group_size > self.world_size:
            raise ValueError(f"consistency.group_size: {group_size} is above world_size {self.world_size}")
        # An average takes the centre's distance to the replicas' mean times 1 - (ranks + 1) alpha.
        if alpha is not None and alpha * (self.world_size + 1) >= 2:
            raise ValueError(
                f"consistency.alpha: {alpha:g} lets the centre of {self.world_size} replicas overshoot ever farther; "
                f"allowed: below {2 / (self.world_size + 1):.3g}, 2 / (ranks + 1)"
            )


def signature(plan: SyncPlan) -> str:
    """A digest of what a plan does: equal plans whose messages only have other names have the same one."""
    groups = [group.model_dump(mode="json", exclude={"name"}, exclude_defaults=True) for group in plan.groups]
    return digest([plan.consistency.model_dump(mode="json"), groups])
