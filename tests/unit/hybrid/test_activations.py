"""Functions on values in other layouts, in a job of one rank, where the parts are the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_autosync.errors import AutoSyncError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.activation import Activation, Surroundings, bring_home
from lightning_autosync.hybrid.execution.layouts import Layout
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.random_streams import RandomStreams

VALUE = torch.arange(-12.0, 12.0).reshape(4, 6)


@pytest.fixture(scope="module")
def around() -> Iterator[Surroundings]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = LiveMesh(HybridPlan(mesh=(1,), layers=(LayerPlan(module="", signature=("col",)),)))
        yield Surroundings(mesh, RandomStreams(0, mesh.coordinates, torch.device("cpu")))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def split(around: Surroundings) -> Activation:
    """`VALUE`, cut by features."""
    around.forget()
    return Activation(VALUE.clone(), Layout(("features",), 0, 1), around)


def _set_item(value: Tensor) -> None:
    value[:, 1:3] = 7.0


def _set_where(value: Tensor) -> None:
    value[value > 3] = 0.0


def _add_to_item(value: Tensor) -> None:
    value[0, 2] += 5.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "slice": _set_item,
    "mask": _set_where,
    "element": _add_to_item,
    "unlike operand": lambda value: value.__iadd__(torch.arange(6.0)),
    "no handler": lambda value: value.__imod__(5.0),
    "function": lambda value: value.cumsum_(1),
    "inplace": lambda value: F.relu(value, inplace=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_kept(split: Activation, name: str) -> None:
    expected = VALUE.clone()
    CHANGES[name](split)
    CHANGES[name](expected)
    assert torch.equal(bring_home(split * 1.0), expected), "functions of parts see it too"
    assert not torch.equal(expected, VALUE)


BY_NAME: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda value: torch.flatten(input=value, start_dim=0),
    "transpose": lambda value: torch.transpose(input=value, dim0=0, dim1=1),
    "mean": lambda value: torch.mean(input=value, dim=1),
    "numpy's input": lambda value: torch.sum(a=value, axis=1),
    "split": lambda value: torch.split(tensor=value, split_size_or_sections=2, dim=1)[1],
    "unbind": lambda value: torch.unbind(dim=1, input=value)[2],
    "unbind along numpy's axis": lambda value: torch.unbind(value, axis=1)[2],
    "chunk along numpy's axis": lambda value: torch.chunk(value, 2, axis=1)[1],
    "concatenate along numpy's axis": lambda value: torch.cat(tensors=[value, value], axis=1),
    "add": lambda value: torch.add(input=value, other=value, alpha=2),
    "relu": lambda value: F.relu(input=value),
    "relu in place": lambda value: F.relu(input=value, inplace=True),
    "where": lambda value: torch.where(condition=value > 0, input=value, other=-value),
    "where without values": lambda value: torch.where(value > 0)[1],
}


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_name(split: Activation, name: str) -> None:
    assert torch.equal(bring_home(BY_NAME[name](split)), BY_NAME[name](VALUE.clone()))


def test_axes_of_values_without_samples(around: Surroundings) -> None:
    """`axis` is not taken for 0, along which such a value may be handled."""
    value = Activation(VALUE.clone(), Layout(("features",), None, 1), around)
    assert torch.cat([value, value], axis=1).shape == (4, 12)


@pytest.mark.parametrize("name", ["slice", "no handler", "inplace"])
def test_changes_in_place_leave_cached_values_alone(split: Activation, name: str) -> None:
    known = split.home()
    CHANGES[name](split)
    assert torch.equal(known, VALUE)


def test_values_without_versions(around: Surroundings) -> None:
    """Lightning validates in inference mode under NCCL, where tensors count no changes."""
    with torch.inference_mode():
        value = Activation(VALUE.clone(), Layout(("features",), 0, 1), around)
        assert torch.equal(bring_home(value.relu()), VALUE.relu())
        value.mul_(2.0)
        assert torch.equal(value.home(), 2 * VALUE), "no value from before the change is taken"
        assert around.alike(torch.arange(3))


@pytest.mark.parametrize("function", [torch.add, torch.remainder])
def test_results_come_where_they_are_asked_for(split: Activation, function: Callable[..., Any]) -> None:
    """As a part of the tensor, or as its conversion, `out` would be a copy that nobody reads."""
    goal, plain = split * 1.0, torch.zeros_like(VALUE)
    assert function(split, 2.0, out=goal) is goal
    assert torch.equal(bring_home(goal), function(VALUE, 2.0))
    assert function(split, 2.0, out=plain) is plain
    assert torch.equal(plain, function(VALUE, 2.0))


def test_changes_in_place_keep_the_dtype(around: Surroundings) -> None:
    layout, wide = Layout(("features",), 0, 1), torch.full_like(VALUE, 0.3)
    value = Activation(VALUE.bfloat16(), layout, around)
    value += Activation(wide, layout, around)
    expected = VALUE.bfloat16()
    expected += wide
    assert value.dtype == value.local.dtype == torch.bfloat16
    assert torch.equal(bring_home(value * 1.0), expected)


def test_changes_of_the_shape_in_place_are_refused(split: Activation) -> None:
    with pytest.raises(AutoSyncError, match=r"the shape of a split value from \(4, 6\) to \(4, 6, 1\)"):
        split.unsqueeze_(-1)


class Reversed(torch.autograd.Function):
    """Reverses and scales the gradient, as adversarial domain adaptation does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Scaled(torch.autograd.Function):
    """Takes values in a list, to which torch lets no gradient come."""

    @staticmethod
    def forward(ctx: Any, values: list[Tensor], factor: Tensor) -> Tensor:
        ctx.value = values[0]
        return values[0] * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0] * ctx.value


reverse = Reversed.apply


def test_backward_of_own_functions_is_called(around: Surroundings) -> None:
    weight = VALUE.clone().requires_grad_()
    value = Activation(weight * 1.0, Layout(("features",), 0, 1), around)
    bring_home(reverse(value, 2.0)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(VALUE, -2.0))


def test_own_functions_with_split_values_in_lists(split: Activation) -> None:
    factor = torch.ones_like(VALUE).requires_grad_()
    bring_home(Scaled.apply([split], factor)).sum().backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad, VALUE)


def test_split_values_made_within_functions_are_refused(around: Surroundings) -> None:
    """As by reentrant checkpoints of blocks that end with a split layer."""
    weight = VALUE.clone().requires_grad_()

    def block(value: Tensor) -> Tensor:
        return Activation(value * 1.0, Layout(("features",), 0, 1), around)

    with pytest.raises(AutoSyncError, match="CheckpointFunction: its forward pass returned a split value"):
        checkpoint(block, weight, use_reentrant=True)
    with torch.no_grad():
        assert torch.equal(bring_home(checkpoint(block, weight, use_reentrant=True)), VALUE)


def _then_rand(value: Any) -> Any:
    return lambda given: (value(given), torch.rand(3))[1]


DRAWS: dict[str, Callable[[Any], Any]] = {
    "randn_like": torch.randn_like,
    "rand_like": lambda value: torch.rand_like(value) + value,
    "bernoulli": lambda value: torch.bernoulli(torch.sigmoid(value)),
    "bernoulli in place": lambda value: (value * 1.0).bernoulli_(0.5),
    "rrelu": lambda value: F.rrelu(value, training=True),
    "rrelu in place": lambda value: (value := value * 1.0, F.rrelu(value, training=True, inplace=True))[0] * 1.0,
    "after no dropout": _then_rand(lambda value: F.dropout(value, 0.0)),
    "after no dropout by name": _then_rand(lambda value: torch.dropout(value, p=0.0, train=True)),
    "after dropout in evaluation": _then_rand(lambda value: torch.dropout(value, 0.5, False)),
    "after alpha dropout by default": _then_rand(lambda value: F.alpha_dropout(value, 0.5)),
    "after attention": _then_rand(lambda value: _attention(value, 0.0)),
}


def _attention(value: Any, dropout: float) -> Any:
    heads = value.unflatten(1, (2, 3, 1)).transpose(2, 3)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_as_in_the_unsplit_model(around: Surroundings, split: Activation, name: str) -> None:
    found = []
    for value in (split, VALUE.clone()):
        with around.streams.forward(number=-1):
            found.append(bring_home(DRAWS[name](value)))
    assert torch.equal(*found)


@pytest.mark.parametrize(("axis", "parts"), [(1, True), (2, False)])
@pytest.mark.parametrize("drop", [F.dropout1d, F.feature_alpha_dropout, torch.feature_dropout])
def test_channels_are_dropped_as_a_whole(around: Surroundings, drop: Any, axis: int, parts: bool) -> None:
    """Ranks with parts of a channel would drop one part and keep another."""
    value = Activation(torch.ones(2, 4, 6), Layout(("features",), 0, axis), around)
    with around.streams.forward():
        assert isinstance(drop(value, 0.5, True), Activation) == parts
        assert isinstance(F.dropout(value, 0.5), Activation)
