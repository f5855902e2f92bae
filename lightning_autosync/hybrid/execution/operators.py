"""Operators that work on a rank's part of their input with its parts of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autosync.errors import ExchangeError
from lightning_autosync.hybrid.execution.activation import Activation, Surroundings
from lightning_autosync.hybrid.execution.layouts import Layout, State
from lightning_autosync.hybrid.plan import LayerPlan
from lightning_autosync.hybrid.signatures import Rule, feature_axis, kind_of, rules_of


class SplitOperator:
    """Replaces a module's ``forward``: converts the input to the layout that the signature needs, computes on this
    rank's part, and converts the output to the layout in the plan.

    Args:
        module: the operator, whose parameters are this rank's parts.
    """

    casts = False
    """Whether it computes in the narrow dtype under autocast; then its input is also sent in that dtype."""

    def __init__(self, module: nn.Module, layer: LayerPlan, around: Surroundings) -> None:
        rules = [rules_of(module)[name] for name in layer.signature]
        self.module: Any = module
        self.layer = layer
        self.around = around
        self.needs: tuple[State, ...] = tuple(rule.taken for rule in rules)
        self.makes: tuple[State, ...] = tuple(rule.result for rule in rules)
        asked = layer.output or (None,) * len(rules)
        self.hands_on: tuple[State, ...] = tuple(map(Rule.handed_on, rules, asked))
        self._axis = feature_axis(module)

    def __call__(self, value: Tensor) -> Tensor:
        self.around.enter(self.layer.module)
        local, rows = self.take(value)
        return self.give(self.compute(local), rows)

    def compute(self, value: Tensor) -> Tensor:
        """A rank's part of the output from its part of the input."""
        found: Tensor = type(self.module).forward(self.module, value)
        return found

    def take(self, value: Tensor, rows: int | None = -1) -> tuple[Tensor, int | None]:
        """This rank's part of an input, and the axis of samples.

        Args:
            value: an activation or a plain tensor.
            rows: axis of samples of a plain tensor; -1 takes that of the plan.
        """
        axis = self._axis % max(value.dim(), 1)
        expected = self.layer.batch_axis if rows == -1 else rows
        if isinstance(value, Activation):
            layout, local = value.placement, value.local
            torn = layout.by_features and "features" in self.needs and (layout.features != axis or layout.parts > 1)
            moved = None not in (layout.rows, expected) and layout.rows != expected
            if torn or moved:
                local, layout = value.home(), self.around.home(expected)
        else:
            layout, local = self.around.home(expected), value
            self._note_common(value, expected)
        if not layout.by_features:
            layout = replace(layout, features=axis, parts=1)
        if self.casts:
            local = self.around.autocast(local)
        return self.around.change(local, layout, self.needs), layout.rows

    def _note_common(self, value: Tensor, rows: int | None) -> None:
        """Note a plain input without samples, of which this rank takes its own for every rank's."""
        base = value._base if value._is_view() else value
        if rows is None and not isinstance(base, nn.Parameter):  # copies of parameters are compared anyway
            self.around.record.note_input(self.layer.module, value)

    def give(self, local: Tensor, rows: int | None) -> Tensor:
        """The output in the layout of the plan."""
        self.around.record.note(self.layer.module)
        layout = Layout(self.makes, rows, self._axis % max(local.dim(), 1), self.layer.parts)
        local = self.around.convert(local, layout, self.hands_on)
        return self.around.wrap(local, layout.with_states(self.hands_on))

    def bias_once(self, bias: Tensor | None) -> Tensor | None:
        """The bias on ranks whose summand of a partial output includes it; zeros on the ranks with other summands."""
        summands = [k for k, state in enumerate(self.makes) if state == "partial"]
        if bias is None or not summands:
            return bias
        first = all(self.around.mesh.coordinates[k] == 0 for k in summands)
        found: Tensor = _Once.apply(bias, first)
        return found


class _Once(torch.autograd.Function):
    """The value on the first rank and zeros on the others; every rank gets the whole gradient."""

    takes_parts = True

    @staticmethod
    def forward(ctx: Any, value: Tensor, first: bool) -> Tensor:
        return value.clone() if first else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SplitLinear(SplitOperator):
    """``nn.Linear``."""

    casts = True

    def compute(self, value: Tensor) -> Tensor:
        return F.linear(value, self.module.weight, self.bias_once(self.module.bias))


class SplitTransposedLinear(SplitOperator):
    """The transposed linear layer of GPT-2 in transformers (``Conv1D``)."""

    casts = True

    def compute(self, value: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.bias_once(self.module.bias)
        assert bias is not None
        found = torch.addmm(bias, value.reshape(-1, value.shape[-1]), weight)
        return found.view(*value.shape[:-1], weight.shape[1])


class SplitConvolution(SplitOperator):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``, by channels."""

    casts = True

    def compute(self, value: Tensor) -> Tensor:
        found: Tensor = self.module._conv_forward(value, self.module.weight, self.bias_once(self.module.bias))
        return found


class SplitEmbedding(SplitOperator):
    """``nn.Embedding``; with ``row`` a rank without the looked-up row contributes zeros."""

    def take(self, value: Tensor, rows: int | None = -1) -> tuple[Tensor, int | None]:
        # Indices have no axis of features, so only samples can be cut.
        layout = self.around.home(self.layer.batch_axis)
        plain = value.home() if isinstance(value, Activation) else value
        self._note_common(plain, layout.rows)
        states: list[State] = ["batch" if state == "batch" else "full" for state in self.needs]
        return self.around.change(plain, layout, states), layout.rows

    def compute(self, value: Tensor) -> Tensor:
        table = self.module
        own, padding = table.weight.shape[0], table.padding_idx
        if "partial" not in self.makes:
            return F.embedding(value, table.weight, padding)
        self._check_indices(value, own * self._blocks)
        start = own * self._block()
        padding = padding - start if padding is not None and start <= padding < start + own else None
        inside = (value >= start) & (value < start + own)
        found = F.embedding(torch.where(inside, value - start, 0), table.weight, padding)
        return found * inside.unsqueeze(-1).to(found.dtype)

    def _check_indices(self, indices: Tensor, rows: int) -> None:
        """Refuse indices that no rank's rows have, as torch does; every rank would contribute zeros for them."""
        valid = ((indices >= 0) & (indices < rows)).all()
        told = f"'{self.layer.module}': index out of range; allowed: 0 to {rows - 1}"
        if indices.device.type != "cpu":
            torch._assert_async(valid, told)
        elif not valid:
            raise IndexError(told)

    @property
    def _blocks(self) -> int:
        """The number of blocks of rows."""
        return self.around.mesh.size([k for k, state in enumerate(self.makes) if state == "partial"])

    def _block(self) -> int:
        """The index of this rank's block of rows in the table."""
        block, mesh = 0, self.around.mesh
        for k, state in enumerate(self.makes):
            if state == "partial":
                block = block * mesh.sizes[k] + mesh.coordinates[k]
        return block


class SplitAttention(SplitOperator):
    """``nn.MultiheadAttention`` by heads."""

    casts = True

    def __call__(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self.around.enter(self.layer.module)
        first = self.module.batch_first
        if query.dim() != 3:
            raise ValueError(
                f"'{self.layer.module}': expected a batch of sequences (3 axes), got shape {tuple(query.shape)}"
            )
        if is_causal and attn_mask is None:  # as torch does
            raise RuntimeError(f"'{self.layer.module}': Need attn_mask if specifying the is_causal hint.")
        samples = query.shape[0 if first else 1]
        parts = [self.take(item, 0 if first else 1) for item in (query, key, value)]
        rows = parts[0][1]
        q, k, v = self._project(*(local if first else local.transpose(0, 1) for local, _ in parts))
        mask = self._mask(key_padding_mask, attn_mask, samples, q)
        mixed, weights = self._attend(q, k, v, mask, need_weights)
        out = self.module.out_proj
        found = F.linear(mixed.transpose(1, 2).flatten(2), out.weight, self.bias_once(out.bias))
        result = self.give(found if first else found.transpose(0, 1), rows)
        return result, self._weights(weights, average_attn_weights) if weights is not None else None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values [batch, heads, length, width] of this rank's heads."""
        weights = self.module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.module.in_proj_bias is None else self.module.in_proj_bias.chunk(3)
        made = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return [item.unflatten(-1, (-1, self.module.head_dim)).transpose(1, 2) for item in made]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.module.dropout if self.module.training else 0.0
        # Ranks with the same heads of the same samples must drop the same weights.
        states: list[State] = ["features" if state == "copy" else state for state in self.needs]
        with self.around.streams.shared(states, dropout):
            if not need_weights:
                return F.scaled_dot_product_attention(query, key, value, mask, dropout), None
            scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            return weights @ value, weights

    def _mask(self, padding: Tensor | None, mask: Tensor | None, samples: int, query: Tensor) -> Tensor | None:
        """The mask to add to the scores [batch, heads, query, key] of this rank's samples and heads; None for none."""
        found = None
        states: list[State] = ["batch" if state == "batch" else "full" for state in self.needs]
        change = self.around.change
        if mask is not None:
            found = _additive(mask, query.dtype)
            if mask.dim() == 3:
                found = found.unflatten(0, (samples, -1))
                by_heads = replace(self.around.home(), features=1)
                cut: list[State] = ["features" if state == "copy" else state for state in self.needs]
                found = change(found, by_heads, cut)
            else:
                self._check_same(mask)
                # Ranks with other heads each have a summand of the gradient of a mask that is learned.
                found = change(found, self.around.home(None), self.needs)
        if padding is not None:
            own = change(_additive(padding, query.dtype), self.around.home(), states)[:, None, None, :]
            found = own if found is None else found + own
        return found

    def _check_same(self, mask: Tensor) -> None:
        if not (isinstance(mask, nn.Parameter) or self.around.alike(mask)):
            raise ExchangeError(
                f"'{self.layer.module}': a two-dimensional attn_mask must be the same on all ranks; allowed "
                "otherwise: masks by sample and head [samples x heads, queries, keys]"
            )

    def _weights(self, weights: Tensor, average: bool) -> Tensor:
        """Attention weights for this rank's own samples: [batch, query, key], or [batch, heads, query, key]."""
        mesh = self.around.mesh
        ranks = mesh.size([k for k, state in enumerate(self.makes) if state == "partial"])
        if average:
            layout = Layout(self.makes, 0)
            weights = weights.mean(1) / ranks
        else:
            states: list[State] = ["features" if state == "partial" else state for state in self.makes]
            layout = Layout(tuple(states), 0, features=1)
        return self.around.convert(weights, layout, self.around.home_states)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


_OPERATORS: dict[str, type[SplitOperator]] = {
    "linear": SplitLinear,
    "transposed_linear": SplitTransposedLinear,
    "convolution": SplitConvolution,
    "embedding": SplitEmbedding,
    "attention": SplitAttention,
    "norm": SplitOperator,
}


def split_operator(module: nn.Module, layer: LayerPlan, around: Surroundings) -> Callable[..., Any]:
    """The replacement of a module's ``forward``."""
    return _OPERATORS[kind_of(module)](module, layer, around)
