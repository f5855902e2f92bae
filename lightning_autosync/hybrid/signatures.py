"""Signatures: how a kind of module can be split along one dimension of a mesh.

The signatures follow OneFlow's split, broadcast and partial values (Yuan et al., 2021), whose combinations AutoDDL
(Chen et al., 2023) searches. Along one dimension of the mesh an activation is

- ``batch``: cut along the axis of its samples, usually the first axis;
- ``features``: cut along the axis of its features (the last axis; after a convolution the channels, axis 1);
- ``full``: whole and equal on every rank;
- ``partial`` (results only): every rank has a summand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_autosync.documents import allowed_names
from lightning_autosync.hybrid.execution.layouts import State
from lightning_autosync.hybrid.plan import Layout, Signature

Result = Literal["batch", "features", "full", "partial"]
Kind = Literal["linear", "transposed_linear", "convolution", "embedding", "attention", "norm", "batch_norm", "unknown"]


@dataclass(frozen=True)
class Rule:
    """The effect of a signature on one kind of operator.

    Attributes:
        input: required layout of the input.
        result: layout of the output.
        axes: axis along which each parameter is cut; parameters that are not listed are whole on every rank.
    """

    input: Layout
    result: Result
    axes: Mapping[str, int] = field(default_factory=dict)

    @property
    def output(self) -> Layout:
        """The default layout that it hands on: a partial result is summed on every rank."""
        return "full" if self.result == "partial" else self.result

    @property
    def taken(self) -> State:
        """The state in which a layer takes its input.

        It is ``copy`` if ranks compute different outputs from the same input: then each has a summand of its gradient.
        """
        return "copy" if self.input == "full" and self.axes else self.input

    def handed_on(self, asked: Layout | None) -> Layout:
        """The state in which a layer hands on its output; ``asked`` is the plan's choice.

        A value that is cut by samples stays so until a layer needs another layout, so that only what it needs is sent.
        """
        return "batch" if self.result == "batch" else asked or self.output


_DP = Rule("batch", "batch")
_REP = Rule("full", "full")
_ANYWHERE: dict[Signature, Rule] = {"dp": _DP, "rep": _REP}

_PRODUCT: dict[Signature, Rule] = {
    **_ANYWHERE,
    "col": Rule("full", "features", {"weight": 0, "bias": 0}),
    "row": Rule("features", "partial", {"weight": 1}),
}

RULES: dict[Kind, dict[Signature, Rule]] = {
    "linear": _PRODUCT,
    "convolution": _PRODUCT,
    "transposed_linear": {
        **_ANYWHERE,
        "col": Rule("full", "features", {"weight": 1, "bias": 0}),
        "row": Rule("features", "partial", {"weight": 0}),
    },
    # With ``row``, a rank without the looked-up row of the table contributes zeros.
    "embedding": {
        **_ANYWHERE,
        "col": Rule("full", "features", {"weight": 1}),
        "row": Rule("full", "partial", {"weight": 0}),
    },
    # Queries, keys and values are computed per head, and the output projection sums over the heads.
    "attention": {
        **_ANYWHERE,
        "heads": Rule("full", "partial", {"in_proj_weight": 0, "in_proj_bias": 0, "out_proj.weight": 1}),
    },
    "norm": dict(_ANYWHERE),
    # Statistics are those of a rank's own samples, as in DDP.
    "batch_norm": {"dp": _DP},
    # An unknown module may combine several samples, so it must get the same ones as in DDP.
    "unknown": {"dp": _DP},
}
"""The signatures of each kind of module."""

HOME: dict[Signature, Rule] = {"dp": _DP}
"""The signature of an operation that needs whole values of each rank's own samples."""
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kind_of(module: nn.Module) -> Kind:
    """The kind of a module, by its class."""
    # Subclasses and instances with another ``forward`` (as adapters set) may compute something else.
    kind: type = type(module)
    if _has_own_forward(module):
        return "unknown"
    if kind is nn.Linear:
        return "linear"
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return "transposed_linear"
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.groups == 1:
        return "convolution"
    if isinstance(module, nn.Embedding) and kind is nn.Embedding and module.max_norm is None and not module.sparse:
        return "embedding"
    if isinstance(module, nn.MultiheadAttention) and kind is nn.MultiheadAttention and _splits_by_heads(module):
        return "attention"
    if isinstance(module, _BatchNorm):
        return "batch_norm"
    return "norm" if kind in _NORMS else "unknown"


def class_of(module: nn.Module) -> str:
    """The class of a module for messages, which say if its instance has another ``forward``."""
    return type(module).__name__ + (" with another forward" if _has_own_forward(module) else "")


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module)


def _splits_by_heads(module: nn.MultiheadAttention) -> bool:
    return module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn


def rules_of(module: nn.Module) -> Mapping[Signature, Rule]:
    """The signatures of a module, with their rules."""
    return RULES[kind_of(module)]


def feature_axis(module: nn.Module) -> int:
    """The axis of features in a module's input and output."""
    return 1 if kind_of(module) in ("convolution", "batch_norm") or isinstance(module, nn.GroupNorm) else -1


def refusal(module: nn.Module, signature: Sequence[Signature], mesh: Sequence[int], parts: int = 1) -> str | None:
    """The reason why a module cannot be split with a signature; None if it can.

    Args:
        signature: [dimensions] signature along each dimension of the mesh.
        mesh: [dimensions] sizes of the mesh.
        parts: number of results that follow each other along the output features, each of which is cut by itself; 3
            for queries, keys and values of one projection.
    """
    rules = rules_of(module)
    for name in signature:
        if name not in rules:
            return f"{class_of(module)} has no signature '{name}'; {allowed_names(name, rules)}"
    cut: dict[tuple[str, int], int] = {}
    for name, size in zip(signature, mesh, strict=True):
        for place in rules[name].axes.items():
            cut[place] = cut.get(place, 1) * size
    for (owned, axis), pieces in cut.items():
        parameter = _parameter(module, owned)
        if parameter is None:
            continue
        extent = parameter.shape[axis]
        # Only output axes (of the weight and the bias) contain several parts, each of which must be divisible.
        units = extent // parts if _is_output_axis(module, owned, axis) else extent
        if units % pieces or (units != extent and extent % parts):
            of_parts = f" in each of {parts} parts" if units != extent else ""
            return f"{owned} has size {units} along axis {axis}{of_parts}; {pieces} ranks cannot share it evenly"
    if isinstance(module, nn.MultiheadAttention):
        ranks = math.prod(size for name, size in zip(signature, mesh, strict=True) if name == "heads")
        if module.num_heads % ranks:
            return f"{module.num_heads} heads cannot be shared evenly by {ranks} ranks"
    return None


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, last = name.rpartition(".")
    found = getattr(module.get_submodule(owner) if owner else module, last, None)
    return found if isinstance(found, nn.Parameter) else None


def _is_output_axis(module: nn.Module, name: str, axis: int) -> bool:
    column = rules_of(module).get("col")
    return column is not None and column.axes.get(name) == axis
