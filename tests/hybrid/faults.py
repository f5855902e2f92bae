"""Wrong rewrites, each of which the check before training must refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.models import HEADS
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution import boxing, collectives, operators, random_streams, reduction, split_model
from lightning_autosync.hybrid.execution.shards import ParameterShard

Fault = Callable[[nn.Module], Any]
"""Makes a context in which the module is rewritten wrongly."""


def plan_of(model: str) -> HybridPlan:
    """A plan on a mesh of 2 x 2 that uses all signatures."""
    if model == "language":
        signatures: dict[str, Any] = {
            "": (("dp", "dp"), None),
            "embed": (("dp", "row"), None),
            "body": (("row", "col"), None),
            "head": (("dp", "col"), None),
        }
    else:
        signatures = {
            "embed": (("dp", "row"), ("batch", "full")),
            "place": (("dp", "rep"), None),
            "norm": (("dp", "rep"), None),
            "head": (("rep", "col"), None),
        }
        for number in range(2):
            signatures |= {
                f"blocks.{number}.out": (("dp", "row"), ("batch", "full")),
                f"blocks.{number}.before": (("dp", "rep"), None),
                f"blocks.{number}.after": (("dp", "dp"), None),
                f"blocks.{number}.up": (("col", "col"), None),
                f"blocks.{number}.down": (("row", "row"), ("batch", "full")),
                f"blocks.{number}.qkv": (("dp", "col"), None),
            }
    layers = [
        LayerPlan(module=path, signature=signature, output=output, parts=3 if path.endswith("qkv") else 1)
        for path, (signature, output) in signatures.items()
    ]
    return HybridPlan(mesh=(2, 2), layers=tuple(layers))


def _patched(owner: Any, name: str, made: Callable[[Any], Any]) -> Fault:
    return lambda module: mock.patch.object(owner, name, made(getattr(owner, name)))


def _gradient(change: Callable[[Any], Any]) -> Fault:
    """Each move is changed before it carries a gradient."""

    def made(real: Any) -> Any:
        return lambda gradient, move, mesh: real(gradient, change(move), mesh)

    return _patched(boxing, "move_gradient", made)


def _unlike_replicas(real: Any) -> Any:
    return lambda self, states, draw: real(self, states, draw) + dist.get_rank()


def _same_everywhere(real: Any) -> Any:
    return lambda self, states, draw: real(self, tuple("full" for _ in states), draw)


def _same_for_features(real: Any) -> Any:
    return lambda self, states, draw: real(self, tuple("full" if s == "features" else s for s in states), draw)


@contextmanager
def _stale_weights(module: nn.Module) -> Iterator[None]:
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(module.parameters()).add_(0.01)
    yield


def _take_transposed(real: Any) -> Any:
    return lambda self, whole: real(self, whole.T if whole.dim() == 2 and len(set(whole.shape)) == 1 else whole)


def _next_block(real: Any) -> Any:
    def at(self: ParameterShard, coordinates: Any, sizes: Any) -> ParameterShard:
        found = real(self, coordinates, sizes)
        weights = len(found.shape) == 2
        cuts = [cut._replace(block=(cut.block + weights) % cut.blocks) for cut in found.cuts]
        return ParameterShard(found.shape, tuple(cuts))

    return at


def _inner_first(real: Any) -> Any:
    def at(self: ParameterShard, coordinates: Any, sizes: Any) -> ParameterShard:
        # Reversed for all, it would be right again.
        cuts = [cut._replace(dimensions=cut.dimensions[::-1]) if cut.axis == 0 else cut for cut in self.cuts]
        return real(ParameterShard(self.shape, tuple(cuts)), coordinates, sizes)

    return at


def _unmasked(self: Any, value: Tensor) -> Tensor:
    own = self.module.weight.shape[0]
    return F.embedding(value % own, self.module.weight, None)


def _parts(change: Callable[[str, Any], Any]) -> Fault:
    """The parts of parameters are planned, then changed."""

    def made(real: Any) -> Any:
        return lambda self: {name: change(name, part) for name, part in real(self).items()}

    return _patched(split_model.SplitModel, "_plan_parts", made)


def _unreduced(name: str, part: Any) -> Any:
    return dataclasses.replace(part, replicas=()) if name.endswith("qkv.weight") else part


def _reduced_everywhere(name: str, part: Any) -> Any:
    return dataclasses.replace(part, replicas=(0, 1)) if name.endswith("qkv.weight") else part


def _reduced_twice(real: Any) -> Any:
    @contextmanager
    def backward(self: Any) -> Iterator[None]:
        with real(self):
            yield
        for part in self._split.parts.values():
            if part.replicas and part.parameter.grad is not None:
                dist.all_reduce(part.parameter.grad, group=self._split.mesh.group(part.replicas))

    return backward


def _untied(real: Any) -> Any:
    def split(self: Any) -> None:
        real(self)
        self.module.head.weight = nn.Parameter(self.module.head.weight.detach().clone())

    return split


def _swapped_heads(real: Any) -> Any:
    def compute(self: Any, value: Tensor) -> Tensor:
        found = real(self, value)
        if self.layer.parts == 3:
            found = found.unflatten(-1, (3, HEADS // 2, -1)).flip(-2).flatten(-3)
        return found

    return compute


FAULTS: dict[str, tuple[str, Fault]] = {
    "dropped sum of partial results": ("dropping", _patched(collectives, "total", lambda real: lambda t, line: t * 1)),
    "doubled sum of partial results": (
        "dropping",
        _patched(collectives, "total", lambda real: lambda t, line: 2 * real(t, line)),
    ),
    "dropped scattered sum": (
        "dropping",
        _patched(collectives, "scatter", lambda real: lambda blocks, line: blocks[dist.get_rank(line.group)].clone()),
    ),
    "doubled scattered sum": (
        "dropping",
        _patched(collectives, "scatter", lambda real: lambda blocks, line: 2 * real(blocks, line)),
    ),
    "gradient of a copy not summed": (
        "dropping",
        _gradient(lambda move: move._replace(back="keep") if move.back == "sum" else move),
    ),
    "gradient summed twice": (
        "dropping",
        _gradient(lambda move: move._replace(back="sum") if move.back == "keep" else move),
    ),
    "gradient of own loss taken for the mean's": ("dropping", _gradient(lambda move: move._replace(scale="one"))),
    "gradient scaled the wrong way": (
        "dropping",
        _gradient(lambda m: m._replace(scale={"times": "divide", "divide": "times", "one": "one"}[m.scale])),
    ),
    "blocks gathered in reverse": (
        "dropping",
        _patched(collectives, "gather", lambda real: lambda tensor, line: real(tensor, line).flip(0)),
    ),
    "own block gathered in place of the others'": (
        "dropping",
        _patched(collectives, "gather", lambda real: lambda tensor, line: torch.stack([tensor] * line.size)),
    ),
    "blocks exchanged in reverse": (
        "dropping",
        _patched(collectives, "exchange", lambda real: lambda blocks, line: real(blocks, line).flip(0)),
    ),
    "transposed shard": ("dropping", _patched(ParameterShard, "take", _take_transposed)),
    "weights of the next rank": ("dropping", _patched(ParameterShard, "at", _next_block)),
    "two cuts of one axis in the wrong order": ("dropping", _patched(ParameterShard, "at", _inner_first)),
    "queries, keys and values cut as one": (
        "dropping",
        _patched(split_model, "_parts", lambda real: lambda *_: 1),
    ),
    "heads in another order": ("dropping", _patched(operators.SplitLinear, "compute", _swapped_heads)),
    "bias added by each rank": (
        "dropping",
        _patched(operators.SplitOperator, "bias_once", lambda real: lambda self, bias: bias),
    ),
    "bias added by no rank": (
        "dropping",
        _patched(
            operators._Once, "forward", lambda real: staticmethod(lambda ctx, value, first: torch.zeros_like(value))
        ),
    ),
    "bias without a gradient": (
        "dropping",
        _patched(operators._Once, "backward", lambda real: staticmethod(lambda ctx, gradient: (gradient * 0, None))),
    ),
    "rows of other ranks looked up too": (
        "language",
        lambda module: mock.patch.object(operators.SplitEmbedding, "compute", _unmasked),
    ),
    "one gradient not reduced": ("dropping", _parts(_unreduced)),
    "one gradient reduced over ranks with other parts": ("dropping", _parts(_reduced_everywhere)),
    "gradients reduced twice": ("dropping", _patched(reduction.GradientReduction, "backward", _reduced_twice)),
    "weights not tied any more": ("language", _patched(split_model.SplitModel, "split", _untied)),
    "weights that differ before": ("dropping", _stale_weights),
    "same dropout on all ranks": ("dropping", _patched(random_streams.RandomStreams, "_key", _same_everywhere)),
    "same dropout for all features": ("dropping", _patched(random_streams.RandomStreams, "_key", _same_for_features)),
    "other dropout on replicas": ("dropping", _patched(random_streams.RandomStreams, "_key", _unlike_replicas)),
}
