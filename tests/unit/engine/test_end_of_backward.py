"""A callback at the end of a backward pass comes once, after all gradients, however passes are nested."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autosync.engine import end_of_backward
from lightning_autosync.engine.end_of_backward import call_after_backward

BLOCKS = 3


class Blocks(nn.Module):
    """A chain of blocks under reentrant checkpoints, and all of it under another one if ``nested``."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(BLOCKS))
        self.nested = nested

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.chain, inputs, use_reentrant=True) if self.nested else self.chain(inputs)

    def chain(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=True)
        return inputs


def events(module: nn.Module) -> list[str]:
    """What happens in two passes: gradients, and the end of the pass for which the first gradient asked."""
    seen: list[str] = []

    def on_gradient(_: object) -> None:
        if not seen or seen[-1] == "end":
            call_after_backward(lambda: seen.append("end"))
        seen.append("gradient")

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)
    inputs = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        module(inputs).sum().backward()
    return seen


@pytest.mark.parametrize("nested", [False, True])
def test_all_blocks_under_reentrant_checkpoints_are_one_pass(nested: bool) -> None:
    assert events(Blocks(nested)) == [*["gradient"] * BLOCKS, "end"] * 2


def test_a_pass_without_checkpoints() -> None:
    assert (
        events(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
        == [
            *["gradient"] * 2,
            "end",
        ]
        * 2
    )


@pytest.mark.parametrize("backwards", [False, True])
def test_several_callbacks_come_in_the_order_of_their_places(backwards: bool) -> None:
    seen: list[int] = []
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    for place, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, place=place: call_after_backward(lambda: seen.append(place), place)
        )
    for _ in range(2):
        nn.Sequential(*(layers[::-1] if backwards else layers))(torch.ones(1, 2)).sum().backward()
    assert seen == [0, 1, 2] * 2


def test_callbacks_of_a_pass_that_fails_never_come() -> None:
    seen: list[str] = []
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    asks = second.weight.register_post_accumulate_grad_hook(lambda _: call_after_backward(seen.clear))
    fails = first.weight.register_hook(mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        second(first(torch.ones(1, 2))).sum().backward()
    asks.remove()
    fails.remove()
    first.weight.register_post_accumulate_grad_hook(lambda _: call_after_backward(lambda: seen.append("next")))
    second(first(torch.ones(1, 2))).sum().backward()
    assert seen == ["next"]
    assert not end_of_backward._ends


def test_an_inner_pass_of_which_two_gradients_go_on() -> None:
    module, seen = nn.Linear(2, 2, bias=False), []
    module.weight.register_post_accumulate_grad_hook(lambda _: call_after_backward(lambda: seen.append("end")))
    one, two = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    one.register_post_accumulate_grad_hook(lambda _: seen.append("one"))
    two.register_post_accumulate_grad_hook(lambda _: seen.append("two"))
    checkpoint(lambda left, right: module(left + right), one, two, use_reentrant=True).sum().backward()
    assert sorted(seen[:2]) == ["one", "two"]
    assert seen[2:] == ["end"]
