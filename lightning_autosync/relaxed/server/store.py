"""A server's slices of parameters and optimizer state, and their updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_autosync.engine.exchanges.rows import Rows
from lightning_autosync.plan.servers import Piece, Shard
from lightning_autosync.relaxed.server.gradients import Gradient
from lightning_autosync.relaxed.server.optimizer import Hyperparameters, OptimizerRule, StateKey, adopt


class ShardStore:
    """Parameters and optimizer state of one server's shards, on the CPU.

    Args:
        values: parameters [numel] of each shard, by its index in the layout; the store owns them, without a copy.

    Attributes:
        version: number of updates so far.
    """

    def __init__(self, shards: Iterable[Shard], rule: OptimizerRule, values: Mapping[int, Tensor]) -> None:
        self.version = 0
        self._shards = {shard.index: shard for shard in shards}
        self._values = {index: values[index] for index in self._shards}
        self._parameters = {
            index: [nn.Parameter(view) for view in _piece_views(shard, self._values[index])]
            for index, shard in self._shards.items()
        }
        self._row_versions = {
            index: torch.zeros(shard.rows, dtype=torch.int64) for index, shard in self._shards.items() if shard.width
        }
        members: dict[int, list[nn.Parameter]] = {}
        for piece, parameter in self._trained(rule):
            members.setdefault(rule.members[piece.variable], []).append(parameter)
        for shard in self._shards.values():
            if shard.sparse:
                rule.check_sparse(shard.pieces[0].variable)
        self._optimizer = rule.build(members) if members else None

    def values(self, index: int) -> Tensor:
        """The parameters [numel] of a shard; a view, which the next update changes."""
        return self._values[index]

    def changed_rows(self, index: int, since: int) -> Rows:
        """Rows of a row-wise shard that changed after version ``since``.

        Indices count from the first row of the whole table.
        """
        shard = self._shards[index]
        table = self._values[index].view(shard.rows, shard.width)
        chosen = (self._row_versions[index] > since).nonzero().view(-1)
        return Rows(chosen + shard.first_row, table[chosen], gradients=0)

    def update(self, gradients: Mapping[int, Gradient], settings: Hyperparameters) -> None:
        """Step the optimizer; pieces without a gradient on any worker do not change, as with torch."""
        self.version += 1
        if self._optimizer is None:
            return
        adopt(self._optimizer, settings)
        before = {}
        for index, gradient in gradients.items():
            shard = self._shards[index]
            if isinstance(gradient, Rows):
                if gradient.gradients:
                    before[index] = self._before(shard, gradient)
                    self._parameters[index][0].grad = _row_gradient(shard, gradient)
            else:
                for parameter, part in zip(self._parameters[index], gradient.parts, strict=True):
                    parameter.grad = part
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for index, (rows, old) in before.items():
            table = self._values[index].view(-1, self._shards[index].width)
            if rows is None:
                self._row_versions[index][(table != old).any(dim=1)] = self.version
            else:
                self._row_versions[index][rows[(table[rows] != old).any(dim=1)]] = self.version

    def _before(self, shard: Shard, gradient: Rows) -> tuple[Tensor | None, Tensor]:
        """Indices of rows that the update may change (None for all), and a copy of their values.

        With a dense gradient, momentum and weight decay may change any row, also one without a gradient. A comparison
        after the update finds the rows that did change.
        """
        table = self._values[shard.index].view(shard.rows, shard.width)
        if not shard.sparse:
            return None, table.clone()
        rows = gradient.indices - shard.first_row
        return rows, table[rows]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state kept here."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.states())

    def states(self) -> Iterator[tuple[StateKey, Tensor]]:
        """The optimizer's state by piece: tensors of the piece's elements, or scalars."""
        if self._optimizer is None:
            return
        for index, shard in self._shards.items():
            for piece, parameter in zip(shard.pieces, self._parameters[index], strict=True):
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                        yield (piece.variable, piece.start, name), tensor

    def load_states(self, states: Mapping[StateKey, Tensor]) -> None:
        """Load the state that `states` gave; another layout's state must be joined and split again before."""
        if self._optimizer is None:
            return
        by_piece: dict[tuple[str, int], dict[str, Tensor]] = {}
        for (variable, start, name), tensor in states.items():
            by_piece.setdefault((variable, start), {})[name] = tensor
        for index, shard in self._shards.items():
            for piece, parameter in zip(shard.pieces, self._parameters[index], strict=True):
                if found := by_piece.get((piece.variable, piece.start)):
                    self._optimizer.state[parameter] = {
                        name: _like_state(tensor, parameter) for name, tensor in found.items()
                    }

    def _trained(self, rule: OptimizerRule) -> Iterator[tuple[Piece, nn.Parameter]]:
        for index, shard in self._shards.items():
            for piece, parameter in zip(shard.pieces, self._parameters[index], strict=True):
                if piece.variable in rule.members:
                    yield piece, parameter


def _piece_views(shard: Shard, flat: Tensor) -> Sequence[Tensor]:
    """Views of ``flat``, one per piece; the piece of a row-wise shard has shape [rows, width]."""
    if shard.width:
        return [flat.view(shard.rows, shard.width)]
    return torch.split(flat, [piece.numel for piece in shard.pieces])


def _row_gradient(shard: Shard, rows: Rows) -> Tensor:
    """The gradient in the form that torch would have: sparse, or dense with zeros in rows that no worker touched."""
    indices = rows.indices - shard.first_row
    if shard.sparse:
        size = (shard.rows, shard.width)
        return torch.sparse_coo_tensor(indices[None], rows.values, size, is_coalesced=True, check_invariants=False)
    dense = rows.values.new_zeros(shard.rows, shard.width)
    dense[indices] = rows.values
    return dense


def _like_state(tensor: Tensor, parameter: nn.Parameter) -> Tensor | int:
    if tensor.dim():
        return tensor.reshape(parameter.shape).clone()
    # An integer step belongs to an optimizer that keeps a Python number; those that keep tensors use floats.
    return tensor.clone() if tensor.is_floating_point() else int(tensor)
