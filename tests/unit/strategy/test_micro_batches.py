"""Micro-batches: the gradient of the whole batch, parts of one shape, and values that are logged once."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares import direct_calls
from lightning_autosync.strategy.shares.micro_batches import MicroBatches, check_divisible
from lightning_autosync.strategy.shares.part_logs import PartLogs
from lightning_autosync.strategy.shares.parts import parts_of

WORDS = [[1, 2], [3], [4, 5, 6, 7], [8]]
"""An entry of another length for each of four samples; the length of one is the number of samples."""


class Pair(NamedTuple):
    """A part of a batch, or of a sample."""

    one: Any
    other: Any


class Module(LightningModule):
    """A module whose steps are made without a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.shapes: list[int] = []
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def training_step(self, batch: Any) -> Any:
        self.shapes.append(len(batch))
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged.append((name, value, options))


class Masked(Module):
    """Its loss is a mean over samples that are not masked."""

    def loss_weight(self, batch: Any) -> Tensor:
        return batch[1].sum()

    def training_step(self, batch: Any) -> Any:
        values, mask = batch
        return (self.layer(values).squeeze(1).square() * mask).sum() / mask.sum()


def weighted_backward(cut: Any) -> Any:
    """As `GradientScale` weights the gradients of a part."""
    return lambda loss: (loss * cut.part).backward()


def step(module: Module, batch: Any, samples: int, size: int) -> Tensor:
    """The loss of a step, after its passes."""
    cut = SimpleNamespace(part=1.0)
    backward = weighted_backward(cut)
    micro_batches = MicroBatches(module, size, backward, lambda: None)
    output = micro_batches.forward(module.training_step, lambda: None, batch, samples, cut)
    module.zero_grad()  # as Lightning does
    micro_batches.add_held()
    backward(output["loss"])
    return output["loss"].detach()


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("samples", [2, 6, 7])
def test_the_gradient_is_that_of_the_whole_batch(samples: int) -> None:
    module, batch = Module(), torch.randn(samples, 3)
    expected = module.training_step(batch)
    expected.backward()
    wanted = [gradient.clone() for gradient in gradients(module)]
    module.shapes.clear()
    found = step(module, batch, samples, 2)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradients(module), wanted)
    assert module.shapes == [2] * (samples // 2) + [1] * (samples % 2)


def test_gradients_of_earlier_batches_are_kept_until_they_are_set_to_zero() -> None:
    module = Module()
    module.layer.weight.grad = older = torch.ones(1, 3)
    cut = SimpleNamespace(part=1.0)
    micro_batches = MicroBatches(module, 2, weighted_backward(cut), lambda: None)
    micro_batches.forward(module.training_step, lambda: None, torch.randn(6, 3), 6, cut)
    assert module.layer.weight.grad is older
    assert torch.equal(older, torch.ones(1, 3))
    micro_batches.add_held()
    assert not torch.equal(module.layer.weight.grad, torch.ones(1, 3))
    assert module.layer.bias.grad is not None


def test_parts_count_by_the_terms_of_their_losses() -> None:
    module, batch = Masked(), [torch.randn(6, 3), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])]
    expected = module.training_step(batch)
    expected.backward()
    wanted = [gradient.clone() for gradient in gradients(module)]
    torch.testing.assert_close(step(module, batch, 6, 2), expected.detach())
    torch.testing.assert_close(gradients(module), wanted)


def test_a_loss_is_logged_once_for_the_batch() -> None:
    module, batch = Module(), torch.randn(7, 3)
    loss = step(module, batch, 7, 2)
    (name, value, options) = module.logged[0]
    assert (len(module.logged), name, options) == (1, "loss", {"sync_dist": True})
    torch.testing.assert_close(value, loss)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 0.75 * 2.0 + 0.25 * 6.0),
        ({"batch_size": 5}, 4.0),
        ({"reduce_fx": "sum"}, 8.0),
        ({"reduce_fx": torch.max}, 6.0),
        ({"reduce_fx": min}, 2.0),
    ],
    ids=str,
)
def test_values_of_parts_become_one_value(options: dict[str, Any], value: float) -> None:
    module = Module()
    logs = PartLogs(module)
    for weight, each in ((0.75, 2), (0.25, 6.0)):
        with logs.part(weight):
            module.log_dict({"value": each}, **options)
    logs.log()
    ((_, found, kept),) = module.logged
    assert float(found) == pytest.approx(value)
    assert kept.get("batch_size") == (10 if "batch_size" in options else None)


def test_values_of_a_part_that_fails_are_not_logged() -> None:
    module = Module()
    logs = PartLogs(module)
    with suppress(MemoryError), logs.part(0.5):
        module.log("value", 1.0)
        raise MemoryError
    with logs.part(0.5):
        module.log("value", 3.0)
    logs.log()
    assert [float(value) for _, value, _ in module.logged] == [3.0]


@pytest.mark.parametrize("overridden", [False, True], ids=["named", "passed on"])
def test_positional_arguments_of_a_log_are_kept(overridden: bool) -> None:
    kept: list[dict[str, Any]] = []

    class Logging(LightningModule):
        def log(self, name: str, value: Any, prog_bar: bool = False, own: str = "", **options: Any) -> None:  # type: ignore[override]
            kept.append({"prog_bar": prog_bar, "own": own, **options})

    class Passing(Logging):
        def log(self, *args: Any, **options: Any) -> None:
            super().log(*args, **options)

    module = Passing() if overridden else Logging()
    logs = PartLogs(module)
    with logs.part(1.0):
        module.log("value", 2.0, True, "mine", sync_dist=True)
    logs.log()
    assert kept == [{"prog_bar": True, "own": "mine", "sync_dist": True}]


@pytest.mark.parametrize(
    ("entry", "first"),
    [
        (WORDS, WORDS[:2]),
        (("a", "b", "c", "d"), ("a", "b")),
        ([torch.tensor(1.0), torch.tensor(2.0)] * 2, [torch.tensor(1.0), torch.tensor(2.0)]),
        ([{"box": [1, 2]}, {"box": [1, 2, 3, 4]}] * 2, [{"box": [1, 2]}, {"box": [1, 2, 3, 4]}]),
        (Pair(WORDS, "train"), Pair(WORDS[:2], "train")),
        ([Pair(1, "a"), Pair(2, "b"), Pair(3, "c"), Pair(4, "d")], [Pair(1, "a"), Pair(2, "b")]),
        ("train", "train"),
    ],
    ids=["lists", "tuple", "numbers", "mappings", "named tuple", "named tuples", "one for all"],
)
def test_lists_without_tensors_are_cut_by_samples(entry: Any, first: Any) -> None:
    ((inputs, found), _, _), _ = parts_of((torch.arange(4), entry), 4, 2, None)
    assert (inputs.tolist(), found, type(found)) == ([0, 1], first, type(first))


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (torch.zeros(3, 3), r"a tensor of shape \(3, 3\)"),
        ([torch.zeros(4, 3), object()], "a value of type object"),
        ([torch.zeros(4, 3), [object()] * 4], "a value of type object"),
        ((torch.zeros(4, 3), WORDS, ["a", "b", "c"]), "a list of 3 entries, none of which is a tensor"),
        ((torch.zeros(4, 3), [torch.tensor(1.0)] * 3), "a list of 3 entries, none of which is a tensor"),
        (Pair(torch.zeros(4, 3), WORDS[:2]), "a list of 2 entries, none of which is a tensor"),
        ({"inputs": torch.zeros(4, 3), "boxes": [{"box": [1, 2]}]}, "a list of 1 entries, none of which is a tensor"),
    ],
    ids=["tensor", "object", "objects", "short list", "short list of numbers", "named tuple", "mappings"],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, what: str) -> None:
    with pytest.raises(
        PlanError, match=f"^micro_batch: a batch of 4 samples cannot be cut, because it has {what}; allowed: "
    ):
        step(Module(), batch, 4, 2)


def test_each_part_needs_a_loss() -> None:
    module = Module()
    with (
        mock.patch.object(module, "training_step", return_value=None),
        pytest.raises(PlanError, match=r"^micro_batch: training_step returned no loss for a micro-batch"),
    ):
        step(module, torch.zeros(4, 3), 4, 2)


def test_a_part_makes_no_collective_operation() -> None:
    module, made = Module(), iter(range(100))
    with (
        mock.patch.object(direct_calls, "_operations", side_effect=lambda: next(made)),
        pytest.raises(PlanError, match=r"^micro_batch: training_step calls an operation of torch.distributed"),
    ):
        step(module, torch.zeros(4, 3), 4, 2)


@pytest.mark.parametrize(
    ("layer", "manual", "message"),
    [(nn.SyncBatchNorm(3), False, "'layer' is a SyncBatchNorm"), (nn.Linear(3, 1), True, "with manual optimization")],
)
def test_modules_that_cannot_be_divided_are_refused(layer: nn.Module, manual: bool, message: str) -> None:
    module: Any = Module()
    module.layer, module.automatic_optimization = layer, not manual
    with pytest.raises(PlanError, match=f"^micro_batch: {message}"):
        check_divisible(module)
