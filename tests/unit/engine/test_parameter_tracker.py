"""What changes of a module's parameters are seen, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_autosync.engine.replicas import ParameterTracker, difference


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2, bias=False))


def _replace(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


def _swap_module(module: nn.Module) -> None:
    module[1][0] = nn.Linear(4, 4)


def _write_into_the_dictionary(module: nn.Module) -> None:
    module[2]._parameters["weight"] = nn.Parameter(torch.ones(2, 4))


def _add(module: nn.Module) -> None:
    module[1][1].register_parameter("slope", nn.Parameter(torch.ones(1)))


def _remove(module: nn.Module) -> None:
    module[0].bias = None


def _wrap(module: nn.Module) -> None:
    module[2] = nn.Sequential(module[2])


def _assign(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def _freeze(module: nn.Module) -> None:
    module[0].bias.requires_grad_(False)


CHANGES = [_replace, _swap_module, _write_into_the_dictionary, _add, _remove, _wrap, _assign, _freeze]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen_until_they_are_accepted(change: Callable[[nn.Module], None]) -> None:
    module = network()
    watch = ParameterTracker(module)
    before, facts = watch.digest(), watch.facts()
    assert not watch.changed()
    change(module)
    assert watch.changed()
    assert watch.digest() != before
    assert difference([facts, watch.facts()])
    after = watch.facts()
    watch.accept()
    assert not watch.changed()
    assert watch.facts() == after


def test_parts_in_torchscript_are_taken_as_they_are() -> None:
    module = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    watch = ParameterTracker(module)
    assert not watch.changed()
    module[1].bias.requires_grad_(False)
    assert watch.changed()


def test_another_shape_is_seen_after_some_steps() -> None:
    module = network()
    watch = ParameterTracker(module)
    module[0].bias.data = torch.ones(7)
    assert any(watch.changed() for _ in range(64))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.add_module("loss", nn.MSELoss()),
        lambda module: module[0].register_buffer("seen", torch.zeros(1)),
        lambda module: module.train(False),
        lambda module: module[0].weight.data.mul_(2),
        lambda module: setattr(module[0].weight, "grad", torch.ones(4, 3)),
    ],
)
def test_what_leaves_the_parameters_alone_is_no_change(change: Callable[[nn.Module], None]) -> None:
    module = network()
    watch = ParameterTracker(module)
    before = watch.digest()
    change(module)
    assert not watch.changed()
    assert watch.digest() == before


def test_freezing_in_turn_comes_back_to_the_same_digests() -> None:
    module = network()
    watch = ParameterTracker(module)
    digests = []
    for number in range(6):
        module[number % 2].requires_grad_(False)
        module[(number + 1) % 2].requires_grad_(True)
        assert watch.changed()
        digests.append(watch.digest())
        watch.accept()
    assert len(set(digests)) == 2
    assert digests == [*digests[:2]] * 3


def test_a_difference_names_parameter_and_ranks() -> None:
    ours, theirs = network(), network()
    watches = [ParameterTracker(module) for module in (ours, theirs)]
    _replace(theirs)
    assert difference([watch.facts() for watch in watches]) == (
        "parameter '0.weight' was replaced by another tensor on rank 1, but not on rank 0"
    )
    assert difference([watch.facts() for watch in reversed(watches)]) == (
        "parameter '0.weight' was replaced by another tensor on rank 0, but not on rank 1"
    )
    _replace(ours)
    assert difference([watch.facts() for watch in watches]) == ""
    _add(ours)
    assert difference([watch.facts() for watch in watches]) == (
        "parameter '1.1.slope' exists on rank 0, but not on rank 1"
    )
