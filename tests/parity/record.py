"""What a job leaves behind, in a form in which two jobs can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-2
"""Differences are relative to a tensor's largest element, or to this if all are smaller."""


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of nested containers, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from flatten(item, f"{path}/{key}")
    elif isinstance(value, Tensor):
        yield path, _kept(value)
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value
    else:
        yield path, type(value).__name__


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[float, str]:
    """The largest difference of two flat records, and where it is; infinite where they cannot be compared."""
    missing = sorted(theirs.keys() ^ ours.keys())
    if missing:
        side = "DDP" if missing[0] in theirs else "AutoSync"
        return math.inf, f"{missing[0]} under {side} only ({len(missing)} such)"
    worst, where = 0.0, ""
    for path, value in theirs.items():
        gap = _gap(value, ours[path])
        if gap > worst:
            worst, where = gap, f"{path}: {_shown(value)}, {_shown(ours[path])}"
    return worst, where


def _kept(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.clone()


def _gap(theirs: Any, ours: Any) -> float:
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        return _tensor_gap(theirs, ours)
    if isinstance(theirs, float) and isinstance(ours, float):
        return _tensor_gap(torch.tensor(theirs, dtype=torch.float64), torch.tensor(ours, dtype=torch.float64))
    return 0.0 if type(theirs) is type(ours) and theirs == ours else math.inf


def _tensor_gap(theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return math.inf
    if not theirs.numel():
        return 0.0
    if theirs.is_complex():
        theirs, ours = torch.view_as_real(theirs.resolve_conj()), torch.view_as_real(ours.resolve_conj())
    theirs, ours = theirs.double(), ours.double()
    distance = torch.where((theirs == ours) | (theirs.isnan() & ours.isnan()), 0.0, (theirs - ours).abs())
    largest = float(theirs.abs().nan_to_num(0.0, 0.0).max())
    return float(distance.nan_to_num(math.inf).max()) / max(largest, FLOOR)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        shown = ", ".join(f"{item:.6g}" for item in value.reshape(-1)[:3].tolist() if not isinstance(item, complex))
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} [{shown}]"
    return repr(value)
