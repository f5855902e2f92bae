"""Measuring real modules, and leaving them as they were."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import capture, describe


class Cnn(nn.Module):
    """Convolution, normalization and dropout; counts and remembers its steps, as user code does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(16, 5)
        self.steps = 0
        self.losses: list[Tensor] = [torch.zeros(())]
        self.seen = {"batches": torch.zeros(2)}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        x = self.drop(F.relu(self.norm(self.conv(images)))).mean((2, 3))
        loss = F.cross_entropy(self.fc(x), labels)
        self.steps += 1
        self.losses.append(loss.detach())
        self.seen["batches"] += 1
        self.seen["last"] = loss
        return loss


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.body(self.tokens(batch))), batch)}


class Tables(nn.Module):
    """A sparse table, a large dense one, a small dense one, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(50, 4, sparse=True)
        self.large = nn.Embedding(60, 4)
        self.small = nn.Embedding(4, 4)
        self.unused = nn.Linear(4, 1)
        self.out = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        summed = self.sparse(batch) + self.large(batch) + self.small(batch % 4)
        return self.out(summed).square().mean()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 12, 12), torch.randint(5, (4,))


@dataclass
class State:
    """An independent copy of all of a module that capture must leave alone."""

    tensors: dict[str, Any]
    plain: dict[str, Any]


def state_of(module: nn.Module) -> State:
    parameters = dict(module.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items()}
    return State(
        tensors={
            "state": copy.deepcopy(dict(module.state_dict())),
            "gradients": {name: g.clone() for name, g in gradients.items() if g is not None},
            "rng": torch.get_rng_state(),
        },
        plain={
            "gradients": {name: id(g) for name, g in gradients.items() if g is not None},
            "modes": [part.training for part in module.modules()],
            "attributes": [list(vars(part)) for part in module.modules()],
            "hooks": [len(p._post_accumulate_grad_hooks or {}) for p in parameters.values()],
            "identities": [id(t) for t in (*module.parameters(), *module.buffers())],
            "flags": [p.requires_grad for p in parameters.values()],
        },
    )


def assert_same_state(module: nn.Module, before: State) -> None:
    now = state_of(module)
    assert now.plain == before.plain
    torch.testing.assert_close(now.tensors, before.tensors, rtol=0, atol=0)


def set_gradients(module: nn.Module) -> None:
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + 1)) if index % 2 else None


def test_cnn_is_timed_and_its_gradients_come_from_the_end() -> None:
    workload = capture(Cnn(), images())
    assert workload.name == "Cnn"
    assert workload.variables_fingerprint == describe(Cnn()).variables_fingerprint
    assert workload.forward_time > 0
    assert workload.optimizer_time == 0
    ready = {variable.name: variable.ready for variable in workload.variables}
    assert all(0 < time <= workload.backward_time for time in ready.values())
    assert ready["fc.weight"] < ready["norm.weight"] < ready["conv.weight"]
    assert {variable.kind for variable in workload.variables} == {"dense"}


@pytest.mark.parametrize("model", [Cnn, Tables])
def test_everything_is_left_as_it_was(model: type[nn.Module]) -> None:
    module = model()
    batch = images() if model is Cnn else torch.tensor([3, 9])
    set_gradients(module)
    module.out.eval() if model is Tables else module.norm.eval()
    before = state_of(module)
    capture(module, batch, steps=2, warmup=1)
    assert_same_state(module, before)


def test_python_state_of_the_module_is_left_as_it_was() -> None:
    module = Cnn()
    losses, first, seen = module.losses, module.losses[0], module.seen
    capture(module, images(), steps=2)
    assert module.steps == 0
    assert module.losses is losses
    assert len(losses) == 1
    assert losses[0] is first
    assert module.seen is seen
    assert list(seen) == ["batches"]
    assert seen["batches"].tolist() == [0, 0]


def test_all_random_generators_are_left_as_they_were() -> None:
    module = Tied()
    module.noise = torch.Generator().manual_seed(3)

    def step(batch: Tensor, _: int) -> Tensor:
        torch.rand(3, generator=module.noise)
        random.random(), np.random.rand(), torch.rand(3)
        return module.training_step(batch)["loss"]

    states = (
        random.getstate(),
        np.random.get_state()[1].copy(),
        torch.get_rng_state(),
        module.noise.get_state(),
    )
    capture(module, torch.tensor([1, 2]), training_step=step, steps=1)
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(module.noise.get_state(), states[3])


def test_everything_is_left_as_it_was_when_a_step_raises() -> None:
    module, batch = Cnn(), images()
    set_gradients(module)
    before = state_of(module)
    calls = []

    def step(batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        calls.append(batch_idx)
        module.eval()
        with torch.no_grad():
            module.conv.weight.zero_()
            module.fc.bias.data.fill_(7)
            module.norm.running_mean.fill_(7)
        loss = module.training_step(batch, batch_idx)
        module.fc.weight.requires_grad_(False)
        module.extra = "attribute"
        if batch_idx == 2:
            raise ZeroDivisionError("in the third step")
        return loss

    with pytest.raises(ZeroDivisionError, match="third step"):
        capture(module, batch, training_step=step)
    assert calls == [0, 1, 2]
    assert_same_state(module, before)
    assert not hasattr(module, "extra")


def test_an_error_in_backward_leaves_no_hook_behind() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("backward broke")

    module = nn.Linear(2, 1)
    before = state_of(module)
    with pytest.raises(ArithmeticError, match="backward broke"):
        capture(module, torch.ones(2), training_step=lambda batch, _: Broken.apply(module(batch)).sum())
    assert_same_state(module, before)


def test_a_batch_changed_in_place_is_restored() -> None:
    module, batch = nn.Linear(2, 1), {"x": torch.ones(3, 2)}

    def step(batch: dict[str, Tensor], _: int) -> Tensor:
        batch["x"].mul_(2)
        return module(batch.pop("x")).sum()

    capture(module, batch, training_step=step, steps=1, warmup=0)
    assert torch.equal(batch["x"], torch.ones(3, 2))


def test_tied_parameters_are_one_variable() -> None:
    workload = capture(Tied(), torch.tensor([1, 2, 3]))
    assert [variable.name for variable in workload.variables] == ["tokens.weight", "body.weight", "body.bias"]
    tokens = workload.variable("tokens.weight")
    # The look-up touches three rows, but the head's gradient is dense.
    assert (tokens.kind, tokens.rows) == ("dense", None)
    assert tokens.ready >= workload.variable("body.weight").ready


def test_frozen_part_is_left_out() -> None:
    module = Cnn()
    module.conv.requires_grad_(False)
    module.conv.weight.grad = held = torch.ones_like(module.conv.weight)
    workload = capture(module, images(), steps=2)
    assert [variable.name for variable in workload.variables] == [
        "norm.weight",
        "norm.bias",
        "fc.weight",
        "fc.bias",
    ]
    assert module.conv.weight.grad is held


def test_sparse_row_sparse_dense_and_unused() -> None:
    workload = capture(Tables(), torch.tensor([3, 9, 9, 20]))
    found = {variable.name: (variable.kind, variable.rows) for variable in workload.variables}
    assert found["sparse.weight"] == ("sparse", 3)
    assert found["large.weight"] == ("row_sparse", 3)
    assert found["small.weight"] == ("dense", None)  # three of four rows
    assert found["out.weight"] == ("dense", None)
    unused = workload.variable("unused.weight")
    assert (unused.kind, unused.ready) == ("dense", None)
    assert workload.ready_order[-2:] == ("unused.bias", "unused.weight")
    assert workload.variable("large.weight").ready is not None


def test_rows_are_the_mean_over_measured_steps() -> None:
    module = Tables()
    touched = [[9, 10, 11, 12, 13, 14], [1], [2, 3], [4, 5, 6]]
    workload = capture(
        module,
        None,
        training_step=lambda _, index: module.large(torch.tensor(touched[index])).sum(),
        steps=3,
        warmup=1,
    )
    assert workload.variable("large.weight").rows == 2


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.03)
        return gradient


def test_ready_times_of_slow_backward() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    workload = capture(
        module,
        torch.ones(2),
        training_step=lambda batch, _: module[1](SlowBackward.apply(module[0](batch))).sum(),
        steps=3,
    )
    assert workload.variable("1.weight").ready < 0.03 <= workload.variable("0.weight").ready
    assert workload.forward_time < 0.03 <= workload.backward_time


def test_a_parameter_used_in_one_slow_step_is_ready_within_the_median_backward() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])

    def step(batch: Tensor, index: int) -> Tensor:
        return module[1](SlowBackward.apply(module[0](batch)) if index == 1 else batch).sum()

    workload = capture(module, torch.ones(2), training_step=step, steps=3, warmup=0)
    assert workload.variable("0.weight").ready == workload.backward_time


def test_a_gradient_made_inside_the_step_has_no_ready_time() -> None:
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def step(batch: Tensor, _: int) -> Tensor:
        module[0](batch).sum().backward()
        return module[1](batch).sum()

    workload = capture(module, torch.ones(2), training_step=step, steps=1)
    assert [variable.ready is None for variable in workload.variables] == [True, True, False, False]


def test_skipped_steps_are_not_counted() -> None:
    module = Tied()
    calls = []

    def step(batch: Tensor, index: int) -> dict[str, Tensor] | None:
        calls.append(index)
        return None if index % 2 else module.training_step(batch)

    assert capture(module, torch.tensor([1]), training_step=step, steps=3, warmup=1).backward_time > 0
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(mode: Callable[[], AbstractContextManager[None]]) -> None:
    module, batch = Cnn(), images()
    before = state_of(module)
    with mode():
        assert capture(module, batch, steps=1, warmup=0).backward_time > 0
        assert not torch.is_grad_enabled()
    assert_same_state(module, before)


def test_synchronized_batch_norm_stays_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def communicate(*_: Any) -> Tensor:
        raise AssertionError("talked to the other ranks")

    module = nn.SyncBatchNorm.convert_sync_batchnorm(Cnn())
    assert isinstance(module.norm, nn.SyncBatchNorm)
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", communicate)
    assert capture(module, images(), steps=1).backward_time > 0
    assert "forward" not in vars(module.norm)


class Logging(lightning.LightningModule):
    """Logs in every way that Lightning offers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).sum()
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({"twice": 2 * loss, "step": float(self.global_step)})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_without_a_trainer_logs_nothing_and_warns_of_nothing() -> None:
    module = Logging()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(module, torch.ones(2), steps=1)
    assert "log" not in vars(module)
    with pytest.warns(UserWarning, match="trainer"):
        module.training_step(torch.ones(2), 0)


def test_a_lightning_module_inside_a_trainer_is_captured_and_trains_the_same() -> None:
    """Captured where a strategy would do it, before the loop can take logs; the weights end up equal."""

    class Capturing(lightning.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.times.append(capture(pl_module, torch.ones(4, 2), steps=1).backward_time)

    def trained(*callbacks: lightning.Callback) -> Tensor:
        torch.manual_seed(5)
        module = Logging()
        trainer = lightning.Trainer(
            max_steps=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 2), batch_size=4, shuffle=True))
        return module.layer.weight.detach()

    capturing = Capturing()
    assert torch.equal(trained(), trained(capturing))
    assert capturing.times[0] > 0


def test_manual_optimization_is_refused() -> None:
    module = Logging()
    module.automatic_optimization = False
    with pytest.raises(WorkloadError, match="Logging: optimizes manually"):
        capture(module, torch.ones(2))


REFUSED: list[tuple[Callable[[nn.Module, Tensor], Any], str]] = [
    (lambda module, x: {"accuracy": x}, "got dict without one"),
    (lambda module, x: 3.0, "got float"),
    (lambda module, x: module(x), r"got shape \(2,\), requires_grad=True"),
    (lambda module, x: module(x).sum().detach(), r"got shape \(\), requires_grad=False"),
    (lambda module, x: None, "Linear: training_step returned None in every measured step"),
]


@pytest.mark.parametrize(("step", "message"), REFUSED)
def test_what_is_no_loss_is_refused(step: Callable[[nn.Module, Tensor], Any], message: str) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(WorkloadError, match=message):
        capture(module, torch.ones(2), training_step=lambda batch, _: step(module, batch))


def test_a_module_without_a_training_step_is_refused() -> None:
    with pytest.raises(WorkloadError, match="Linear: has no training_step"):
        capture(nn.Linear(2, 2), torch.ones(2))


def test_parameters_on_two_devices_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(WorkloadError, match="must be on one device, found cpu, meta"):
        capture(module, torch.ones(2), training_step=lambda batch, _: module(batch).sum())


@pytest.mark.parametrize(("steps", "warmup"), [(0, 1), (1, -1)])
def test_step_counts_are_checked(steps: int, warmup: int) -> None:
    with pytest.raises(WorkloadError, match="needs steps >= 1 and warmup >= 0"):
        capture(nn.Linear(2, 2), torch.ones(2), steps=steps, warmup=warmup)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_on_a_gpu_is_timed_there() -> None:
    module = Cnn().cuda()
    batch = tuple(tensor.cuda() for tensor in images())
    state = torch.cuda.get_rng_state()
    workload = capture(module, batch)
    assert all(0 < v.ready <= workload.backward_time for v in workload.variables)
    assert torch.equal(torch.cuda.get_rng_state(), state)
