"""Optimizer state between servers and checkpoints: whole tensors of the parameters' shapes, however they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_autosync.errors import PlanError
from lightning_autosync.plan.servers import Shard
from lightning_autosync.relaxed.server.replica import assign, elements
from lightning_autosync.relaxed.server.shard import StateKey

Whole = dict[str, dict[str, Tensor]]
"""For each variable its state by name: tensors of the variable's shape, or scalars."""


_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""State that torch's optimizers keep once a parameter, not once an element; a shape would not tell for scalars."""


def join(pieces: Mapping[StateKey, Tensor], shards: Iterable[Shard], shapes: Mapping[str, torch.Size]) -> Whole:
    """Put the servers' pieces together."""
    by_piece: dict[tuple[str, int], dict[str, Tensor]] = {}
    for (variable, start, key), tensor in pieces.items():
        by_piece.setdefault((variable, start), {})[key] = tensor
    whole: Whole = {}
    for shard in shards:
        for piece in shard.pieces:
            variable = piece.variable
            for key, tensor in by_piece.get((variable, piece.start), {}).items():
                states = whole.setdefault(variable, {})
                if key in _SCALARS:
                    # Steps are counted alike in all pieces.
                    states[key] = tensor.clone()
                    continue
                if key not in states:
                    states[key] = torch.empty(shapes[variable], dtype=tensor.dtype)
                assign(states[key], shard.axis, piece, tensor.reshape(-1))
    return whole


def split(whole: Mapping[str, Mapping[str, Tensor]], shards: Iterable[Shard]) -> dict[StateKey, Tensor]:
    """The pieces that some shards need."""
    pieces = {}
    for shard in shards:
        for piece in shard.pieces:
            for key, tensor in whole.get(piece.variable, {}).items():
                part = elements(tensor, shard.axis, piece).reshape(-1) if key not in _SCALARS else tensor
                pieces[piece.variable, piece.start, key] = part
    return pieces


def check(whole: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, torch.Size]) -> None:
    """Raise ``PlanError`` unless the state is one of variables of these shapes."""
    for variable, states in whole.items():
        if variable not in shapes:
            raise PlanError(f"checkpoint: optimizer state of '{variable}', a parameter that this model does not have")
        for key, tensor in states.items():
            if key not in _SCALARS and tensor.shape != shapes[variable]:
                raise PlanError(
                    f"checkpoint: optimizer state '{key}' of '{variable}' has shape {list(tensor.shape)}, the "
                    f"parameter {list(shapes[variable])}"
                )
