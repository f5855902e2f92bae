"""A server's slices of the parameters and of the optimizer's state, and the update of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_autosync.engine.exchanges.rows import Rows
from lightning_autosync.plan.servers import Piece, Shard
from lightning_autosync.relaxed.server.gradients import Gradient
from lightning_autosync.relaxed.server.optimizer import Hyperparameters, OptimizerRule, StateKey, adopt


class ShardStore:
    """What one server keeps: parameters and optimizer state of its shards, in main memory.

    Args:
        shards: the server's own.
        rule: the optimizer.
        values: for each shard (by index in the layout) its parameters, [numel]; they are taken over, not copied.

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
        """The parameters of a shard, [numel]; a view that the next update changes."""
        return self._values[index]

    def changed_rows(self, index: int, since: int, wanted: Tensor | None = None) -> Rows:
        """Rows of a row-wise shard that changed after version ``since``, among ``wanted`` (ascending) if given.

        Indices count from the table's first row.
        """
        shard = self._shards[index]
        table = self._values[index].view(shard.rows, shard.width)
        if wanted is None:
            chosen = (self._row_versions[index] > since).nonzero().view(-1)
        else:
            inside = wanted[(wanted >= shard.first_row) & (wanted < shard.first_row + shard.rows)] - shard.first_row
            chosen = inside[self._row_versions[index][inside] > since]
        return Rows(chosen + shard.first_row, table[chosen], gradients=0)

    def update(self, gradients: Mapping[int, Gradient], settings: Hyperparameters) -> None:
        """One step of the optimizer; pieces that no worker had a gradient for stay as they are, as with torch."""
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
        """Rows that the update may change (None for all), and a copy of what they hold.

        Momentum and weight decay change rows without a gradient, so of a dense gradient's table that is any row;
        which of them do change is found by comparison.
        """
        table = self._values[shard.index].view(shard.rows, shard.width)
        if not shard.sparse:
            return None, table.clone()
        rows = gradient.indices - shard.first_row
        return rows, table[rows]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters kept here."""
        return sum(shard.bytes for shard in self._shards.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state kept here."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.states())

    def states(self) -> Iterator[tuple[StateKey, Tensor]]:
        """The optimizer's state, piece by piece: tensors of the piece's elements, or scalars."""
        if self._optimizer is None:
            return
        for index, shard in self._shards.items():
            for piece, parameter in zip(shard.pieces, self._parameters[index], strict=True):
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                        yield (piece.variable, piece.start, name), tensor

    def load_states(self, states: Mapping[StateKey, Tensor]) -> None:
        """Load what `states` gave, also from another cut into pieces that was joined and split again."""
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
    """For each piece its part of ``flat``; the piece of a row-wise shard as [rows, width]."""
    if shard.width:
        return [flat.view(shard.rows, shard.width)]
    return torch.split(flat, [piece.numel for piece in shard.pieces])


def _row_gradient(shard: Shard, rows: Rows) -> Tensor:
    """The gradient that torch would have: sparse, or dense with zeros where no worker touched a row."""
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
    # A step counts in whole numbers only where the optimizer wants a number and no tensor.
    return tensor.clone() if tensor.is_floating_point() else int(tensor)
