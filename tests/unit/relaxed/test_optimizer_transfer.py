"""An optimizer's state goes to a worker that comes back: what is taken over steps on as if nothing had happened."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autosync.relaxed.model_state import DonatedOptimizer, pack_optimizer
from lightning_autosync.relaxed.server.optimizer import ELEMENTWISE
from lightning_autosync.relaxed.transport.messages import as_bytes
from lightning_autosync.relaxed.transport.payload import Packed, pack


def arrived(packed: Packed) -> DonatedOptimizer | None:
    return DonatedOptimizer.found(3, memoryview(bytearray(b"".join(as_bytes(packed)))))


def make(kind: Any, module: nn.Module, **options: Any) -> Optimizer:
    """Two groups, the parameters in another order than the model's, and one left out."""
    first, second, third, _ = module.parameters()
    made: Optimizer = kind([{"params": [third, first]}, {"params": [second], "lr": 0.02}], lr=0.05, **options)
    return made


def step(module: nn.Module, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE.keys() - {"SparseAdam"}))
def test_the_taker_steps_as_the_donor_does(kind: str, dtype: torch.dtype) -> None:
    donor = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
    optimizer = make(ELEMENTWISE[kind], donor)
    for seed in range(3):
        step(donor, optimizer, seed)
    taker = copy.deepcopy(donor)
    own = make(ELEMENTWISE[kind], taker)
    inheritance = arrived(pack_optimizer(optimizer, list(donor.parameters())))
    step(donor, optimizer, 3)  # what was packed is a copy
    assert inheritance is not None
    # Whoever has not stepped yet may have to hand it on.
    inheritance = arrived(inheritance.packed())
    assert inheritance is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inheritance.give_to(own, list(taker.parameters()))
    step(taker, own, 3)
    for ours, theirs in zip(taker.parameters(), donor.parameters(), strict=True):
        # NAdam keeps a number in single precision that torch loads in the parameter's.
        torch.testing.assert_close(ours, theirs)


def test_before_the_first_step_there_is_nothing_to_give() -> None:
    assert arrived(pack({})) is None


def test_hyperparameters_stay_the_takers() -> None:
    module = nn.Linear(2, 1)
    donor, taker = (torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.3))
    step(module, donor, 0)
    inheritance = arrived(pack_optimizer(donor, list(module.parameters())))
    assert inheritance is not None
    inheritance.give_to(taker, list(module.parameters()))
    assert [group["lr"] for group in taker.param_groups] == [0.3]
    for parameter in module.parameters():
        assert torch.equal(taker.state[parameter]["momentum_buffer"], donor.state[parameter]["momentum_buffer"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.SGD, r"that of rank 3: it is torch\.optim\.sgd\.SGD, but this worker's is torch.*Adam"),
        (torch.optim.LBFGS, r"it is torch\.optim\.lbfgs\.LBFGS, but this worker's is"),
    ],
)
def test_the_state_of_another_optimizer_is_not_taken_over(kind: Any, message: str) -> None:
    module = nn.Linear(2, 1)
    donor, taker = kind(module.parameters(), lr=0.1), torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    donor.step(lambda: torch.ones(()))
    inheritance = arrived(pack_optimizer(donor, list(module.parameters())))
    assert inheritance is not None
    with pytest.warns(UserWarning, match=message):
        inheritance.give_to(taker, list(module.parameters()))
    assert not taker.state


def test_what_cannot_travel_is_said_to_the_taker() -> None:
    module = nn.Linear(2, 1)
    donor, taker = (torch.optim.LBFGS(module.parameters(), lr=0.1) for _ in range(2))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        donor.step(lambda: torch.ones(()))
    inheritance = arrived(pack_optimizer(donor, list(module.parameters())))
    assert inheritance is not None
    with pytest.warns(UserWarning, match=r"its 'old_dirs' is a list, which cannot be sent"):
        inheritance.give_to(taker, list(module.parameters()))
