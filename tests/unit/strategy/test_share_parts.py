"""Steps in parts: the gradient of the whole batch, state that counts once, and attempts that must not be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_autosync.engine import engine
from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares import direct_calls
from lightning_autosync.strategy.shares.auto import AutoShares
from lightning_autosync.strategy.shares.memory import PartialSteps


@pytest.fixture(autouse=True)
def _rank() -> Iterator[None]:
    with mock.patch("torch.distributed.get_rank", return_value=0):
        yield


class Masked(nn.Linear):
    """Its loss is a mean over samples that are not masked."""

    def loss_weight(self, batch: Any) -> Tensor:
        return batch[1].sum()

    def loss(self, batch: Any) -> Tensor:
        values, mask = batch
        return (self(values).squeeze(1).square() * mask).sum() / mask.sum()


def steps(module: nn.Module, limit: float = float("inf")) -> PartialSteps:
    made = PartialSteps(module, nullcontext, lambda: None, lambda _: False)
    made.limit = limit
    return made


def run(loss: Tensor, **also: Any) -> None:
    loss.backward(**also)


def out_of_memory() -> Any:
    raise MemoryError("full")


def test_a_part_without_terms_is_left_out() -> None:
    module = Masked(3, 1)
    batch = [torch.randn(4, 3), torch.tensor([1.0, 1.0, 0.0, 0.0])]
    module.loss(batch).backward()
    assert module.weight.grad is not None
    expected = module.weight.grad.clone()
    module.zero_grad()
    partial = steps(module, limit=2)
    loss = partial.forward(out_of_memory, module.loss, lambda: None, batch, 4)
    torch.testing.assert_close(loss.detach(), module.loss(batch).detach())
    partial.backward(run, loss, 1.0)
    torch.testing.assert_close(module.weight.grad, expected)


def test_state_counts_once_and_both_passes_draw_the_same_random_numbers() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    drawn: list[Tensor] = []

    def compute(part: Tensor) -> Tensor:
        output = module(part)
        drawn.append(output.detach())
        return output.square().mean()  # type: ignore[no-any-return]

    partial = steps(module, limit=4)
    loss = partial.forward(out_of_memory, compute, lambda: None, torch.randn(8, 3), 8)
    partial.backward(run, loss, 1.0)
    assert int(module[0].num_batches_tracked) == 2  # type: ignore[arg-type]
    torch.testing.assert_close(drawn[:2], drawn[2:])


def test_all_parameters_are_not_named_to_autograd() -> None:
    module, named = nn.Linear(3, 1), []

    def backward(loss: Tensor, **also: Any) -> None:
        named.append(also)
        loss.backward(**also)

    partial = steps(module, limit=2)
    loss = partial.forward(out_of_memory, lambda part: module(part).mean(), lambda: None, torch.randn(4, 3), 4)
    partial.backward(backward, loss, 1.0)
    assert named == [{}, {}]


def test_an_attempt_with_a_collective_operation_is_not_repeated() -> None:
    module = nn.Linear(3, 1)
    partial = steps(module)

    def whole() -> None:
        partial.note_collective("all_gather")
        out_of_memory()

    with (
        pytest.warns(UserWarning, match="cannot compute them in parts, because training_step has called all_gather"),
        pytest.raises(MemoryError),
    ):
        partial.forward(whole, lambda part: module(part).mean(), lambda: None, torch.randn(4, 3), 4)


def test_a_part_with_a_collective_operation_is_refused() -> None:
    module = nn.Linear(3, 1)
    partial = steps(module, limit=2)

    def compute(part: Tensor) -> Tensor:
        partial.note_collective("all_gather")
        return module(part).mean()  # type: ignore[no-any-return]

    with pytest.raises(PlanError, match="training_step calls all_gather, but memory suffices for a part"):
        partial.forward(out_of_memory, compute, lambda: None, torch.randn(4, 3), 4)


@pytest.mark.parametrize("where", ["engine", "hook"])
def test_a_pass_that_ended_beside_a_gradient_is_not_repeated(where: str) -> None:
    module = nn.Linear(3, 1)
    if where == "hook":
        module.weight.register_post_accumulate_grad_hook(lambda _: out_of_memory())
    else:
        scope: dict[str, Any] = {"__name__": engine.__name__}
        exec("def fail(*_): raise MemoryError('full')", scope)
        module.weight.register_hook(scope["fail"])
    partial = steps(module)
    batch = torch.randn(4, 3)
    loss = partial.forward(lambda: module(batch).mean(), lambda part: module(part).mean(), lambda: None, batch, 4)
    with pytest.raises(MemoryError):
        partial.backward(run, loss, 1.0)


@pytest.mark.parametrize(
    ("layer", "divides"), [(nn.BatchNorm1d(3), True), (nn.SyncBatchNorm(3), False)], ids=["batch norm", "synchronized"]
)
def test_steps_with_synchronized_batch_norm_are_not_divided(layer: nn.Module, divides: bool) -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def training_step(self, batch: Any) -> None:
            pass

    shares = AutoShares(0, 2, torch.device("cpu"))
    shares.begin_training(Module(), mock.Mock(), run)
    assert (shares.partial is not None) == divides


def test_an_attempt_with_a_direct_collective_operation_is_not_repeated() -> None:
    """Also if memory runs out later, in the backward pass."""
    module, made = nn.Linear(3, 1), [0]
    partial, batch = steps(module), torch.randn(4, 3)

    def whole() -> Tensor:
        made[0] += 1
        return module(batch).mean()  # type: ignore[no-any-return]

    def full(*_: Any, **__: Any) -> None:
        out_of_memory()

    with mock.patch.object(direct_calls, "_operations", side_effect=lambda: made[0]):
        loss = partial.forward(whole, lambda part: module(part).mean(), lambda: None, batch, 4)
        with (
            pytest.warns(UserWarning, match=r"training_step has called an operation of torch.distributed"),
            pytest.raises(MemoryError),
        ):
            partial.backward(full, loss, 1.0)


def test_a_part_with_a_direct_collective_operation_is_refused() -> None:
    module, made = nn.Linear(3, 1), [0]

    def compute(part: Tensor) -> Tensor:
        made[0] += 1
        return module(part).mean()  # type: ignore[no-any-return]

    partial = steps(module, limit=2)
    with (
        mock.patch.object(direct_calls, "_operations", side_effect=lambda: made[0]),
        pytest.raises(PlanError, match=r"training_step calls an operation of torch.distributed, but memory suffices"),
    ):
        partial.forward(out_of_memory, compute, lambda: None, torch.randn(4, 3), 4)


def test_operations_of_this_package_do_not_count() -> None:
    made = [0]
    with mock.patch.object(direct_calls, "_operations", side_effect=lambda: made[0]):
        calls = direct_calls.DirectCalls()
        calls.begin()
        made[0] += 2
        with calls.left_out():
            made[0] += 3
        assert calls.number == 2
