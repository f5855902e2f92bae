"""`HybridPlan`: how each operator of a model is split over a mesh of ranks, as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from lightning_autosync.cluster.shapes import MOST_RANKS
from lightning_autosync.documents import Count, Document, Index, Record, allowed_names, shown
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.plan import SyncPlan

Signature = Literal["dp", "col", "row", "heads", "rep"]
Layout = Literal["batch", "features", "full"]
MOST_DIMENSIONS = 8
"""Largest number of dimensions of a mesh."""


def groups_along(ranks: NDArray[numpy.int64], dimensions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks that differ only along these dimensions, each in the order of the mesh; ``ranks`` is [mesh]."""
    others = [dimension for dimension in range(ranks.ndim) if dimension not in dimensions]
    size = math.prod(ranks.shape[dimension] for dimension in dimensions)
    rows = ranks.transpose(*others, *sorted(dimensions)).reshape(-1, size)
    return tuple(tuple(int(rank) for rank in row) for row in rows)


class LayerPlan(Record):
    """How one operator is split.

    Attributes:
        module: path in ``named_modules()``; empty for the root.
        signature: [dimensions] how the operator is split along each dimension of the mesh. ``dp``: each rank has its
            own samples and the whole parameters. ``col``: each rank computes some of the output features. ``row``: each
            rank has some of the input features and computes a summand of the output. ``heads``: each rank has some
            heads of an attention. ``rep``: each rank computes everything.
        output: [dimensions] layout that the operator hands on: ``batch`` (cut by samples; always after ``dp``),
            ``features`` (cut by features) or ``full``. None hands on the signature's own result; partial results are
            summed in full.
        parts: number of results that follow each other along the output features, each of which is cut by itself; 3 for
            queries, keys and values of one projection.
        batch_axis: axis of the samples in the input and output; null if there is none, as in a table of positions. Then
            ``batch`` is the same as ``full``, and ``dp`` means that the gradient is partial.
    """

    module: str
    signature: Annotated[tuple[Signature, ...], Field(min_length=1, max_length=MOST_DIMENSIONS)]
    output: Annotated[tuple[Layout, ...], Field(min_length=1, max_length=MOST_DIMENSIONS)] | None = None
    parts: Annotated[Count, Field(le=64)] = 1
    batch_axis: Index | None = 0


class HybridPlan(Document):
    """How the operators of a model are split over a mesh of ranks, and how replicas' gradients are synchronized.

    The model's input and output are cut by samples along all dimensions: each rank has its own batch and gets the
    results of its own samples, as in DDP. When a layer is called, its input is converted to the layout that its
    signature needs, once for all layers that need the same tensor in the same layout. When the layer returns, its
    result is converted to the layout ``output``. Operations without a layer take their inputs as they are; if they
    combine results in different layouts, these are converted to one. Every parameter must belong to a layer.

    Attributes:
        workload: fingerprint of the parameters (names and shapes) for which the plan was made; None skips the check.
        mesh: sizes of the mesh's dimensions.
        ranks: rank at each place of the mesh in row-major order; None means ascending order.
        layers: the layers, in the order of the forward pass.
        gradients: how ranks with the same parameters synchronize gradients. Either the name of a builder of synchronous
            plans, which is used for each set of such ranks, or a plan if all these sets have the same size.
    """

    FORMAT: ClassVar[str] = "autosync-hybrid/1"
    ERROR: ClassVar[type[DocumentError]] = PlanError

    workload: str | None = None
    mesh: Annotated[tuple[Annotated[Count, Field(le=MOST_RANKS)], ...], Field(min_length=1, max_length=MOST_DIMENSIONS)]
    ranks: tuple[Index, ...] | None = None
    layers: Annotated[tuple[LayerPlan, ...], Field(min_length=1)]
    gradients: str | SyncPlan = "all_reduce"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    @property
    def is_data_parallel(self) -> bool:
        """Whether only the batch is split."""
        return all(name == "dp" for layer in self.layers for name in layer.signature)

    @cached_property
    def rank_array(self) -> NDArray[numpy.int64]:
        """[mesh] rank at each place."""
        order = range(self.world_size) if self.ranks is None else self.ranks
        return numpy.array(order, dtype=numpy.int64).reshape(self.mesh)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank in the mesh."""
        return tuple(int(place[0]) for place in numpy.nonzero(self.rank_array == rank))

    def groups(self, dimensions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that differ only along these dimensions, each in the order of the mesh."""
        return groups_along(self.rank_array, dimensions)

    def layer(self, module: str) -> LayerPlan | None:
        """The layer with a module's path; None if the plan has none."""
        return self._by_module.get(module)

    @cached_property
    def _by_module(self) -> dict[str, LayerPlan]:
        return {layer.module: layer for layer in self.layers}

    def describe(self, width: int = 120) -> str:
        """The plan as a text table, in which repeated blocks are shown once."""
        from lightning_autosync.hybrid.describe import plan_table

        return plan_table(self, width)

    @field_validator("gradients", mode="before")
    @classmethod
    def _read_gradients(cls, value: Any) -> Any:
        """A plan from a mapping, which may have the format line of its own file."""
        # Done here, because the union would name its alternatives in the locations of errors.
        if isinstance(value, str | SyncPlan):
            return value
        if not isinstance(value, dict):
            raise ValueError("expected a builder's name or a plan for gradients")
        fields = dict(value)
        if (found := fields.pop("format", SyncPlan.FORMAT)) != SyncPlan.FORMAT:
            raise ValueError(f"its format is {shown(found)}; expected '{SyncPlan.FORMAT}'")
        return SyncPlan.model_validate(fields)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.world_size > MOST_RANKS:
            raise ValueError(f"mesh: it has {self.world_size} ranks; allowed: at most {MOST_RANKS}")
        if len(self.mesh) > 1 and 1 in self.mesh:
            raise ValueError(f"mesh[{self.mesh.index(1)}]: a dimension of size 1 splits nothing; remove it")
        if self.ranks is not None and sorted(self.ranks) != list(range(self.world_size)):
            raise ValueError(f"ranks: expected each of 0 to {self.world_size - 1} once, got {list(self.ranks)}")
        seen = set()
        for index, layer in enumerate(self.layers):
            where = f"layers[{index}]"
            for name, value in (("signature", layer.signature), ("output", layer.output)):
                if value is not None and len(value) != len(self.mesh):
                    raise ValueError(
                        f"{where}.{name}: expected one for each of {len(self.mesh)} dimensions of the mesh, "
                        f"got {len(value)}"
                    )
            if layer.module in seen:
                raise ValueError(f"{where}.module: another layer already has the module '{layer.module}'")
            seen.add(layer.module)
        return self._check_gradients()

    def _check_gradients(self) -> Self:
        if isinstance(self.gradients, str):
            from lightning_autosync.plan import builders

            if self.gradients not in builders.names():
                raise ValueError(
                    f"gradients: '{self.gradients}' is not a builder of synchronous plans; "
                    f"{allowed_names(self.gradients, builders.names())}"
                )
            return self
        if not self.gradients.has_schedule:
            raise ValueError(
                "gradients.consistency: split operators need all ranks in every step; allowed: mode 'synchronous' "
                "without `served`"
            )
        replicas = {
            tuple(dimension for dimension, name in enumerate(layer.signature) if name == "dp") for layer in self.layers
        }
        sizes = {math.prod(self.mesh[dimension] for dimension in dimensions) for dimensions in replicas}
        if len(replicas) > 1 or sizes != {self.gradients.world_size}:
            raise ValueError(
                f"gradients.world_size: it is {self.gradients.world_size}, but layers have "
                f"{' and '.join(str(size) for size in sorted(sizes))} replicas; use the name of a builder instead"
            )
        return self
