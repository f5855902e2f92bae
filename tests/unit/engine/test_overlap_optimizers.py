"""Steps that are due change parameters, gradients and optimizers as steps without overlap do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from overlapping import Inherits, Job, due
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from lightning_autosync.engine import defer_steps, optimizer_steps, step_overlap
from lightning_autosync.engine.due_parameter import Due, mark, unmark
from lightning_autosync.engine.step_overlap import _apply


@pytest.mark.parametrize("clear", ["optimizer", "module"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared_after_the_step(job: Job, clear: str, set_to_none: bool) -> None:
    (job.optimizer if clear == "optimizer" else job.module).zero_grad(set_to_none)
    job.step()
    (job.optimizer if clear == "optimizer" else job.module).zero_grad(set_to_none)
    assert due(job) == [True] * 4
    job.overlap.settle()
    for parameter, expected in zip(job.module.parameters(), job.expected(), strict=True):
        assert torch.equal(parameter, expected)
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


def test_gradients_cleared_to_none_stay_none(job: Job) -> None:
    job.step()
    job.optimizer.zero_grad()
    job.module.zero_grad(set_to_none=False)
    job.overlap.settle()
    assert [parameter.grad for parameter in job.module.parameters()] == [None] * 4


@pytest.mark.parametrize("kind", optimizer_steps._ELEMENTWISE)
@pytest.mark.parametrize("foreach", [True, False])
def test_steps_of_parts_equal_those_of_all(kind: Any, foreach: bool) -> None:
    job = Job(kind=kind, foreach=foreach)
    for _ in range(5):
        job.optimizer.zero_grad()
        job.step()
        assert due(job) == [True] * 4
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected(5)))
    assert not torch.equal(job.module[0].weight, job.expected(1)[0])
    job.overlap.close()


def test_optimizers_choose_the_same_functions_on_a_device_as_without_overlap(job: Job) -> None:
    job.step()
    assert due(job) == [True] * 4
    with (
        mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", return_value=["cpu"]),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        _, foreach = _default_to_fused_or_foreach(list(job.module.parameters()), differentiable=False, use_fused=False)
    assert foreach


def test_settings_are_those_of_the_time_of_the_step(job: Job) -> None:
    job.step()
    job.optimizer.param_groups[0]["lr"] = 100.0
    assert torch.equal(job.module[2].bias, job.expected()[3])
    assert job.optimizer.param_groups[0]["lr"] == 100.0
    assert list(map(id, job.optimizer.param_groups[0]["params"])) == list(map(id, job.module.parameters()))


def test_values_are_clipped_when_they_have_come(job: Job) -> None:
    job.backward()
    nn.utils.clip_grad_value_(job.module.parameters(), 0.5)
    nn.utils.clip_grad_value_(job.module.parameters(), 0.25)
    assert due(job) == [True] * 4
    largest = float(job.module[2].weight.grad.abs().max())
    assert largest == 0.25


def test_clipping_leaves_parameters_without_gradients_alone(job: Job) -> None:
    unused = nn.Parameter(torch.ones(2))
    mark(unused, Due(job.overlap, 0, limit=1.0))
    _apply([(unused, due) for due in [unmark(unused)] if due is not None])
    assert unused.grad is None


def test_a_second_step_with_the_same_gradient_comes_after_the_first(job: Job) -> None:
    job.step()
    job.optimizer.step()
    assert due(job) == [False] * 4
    other = Job()
    other.step()
    other.overlap.settle()
    other.optimizer.step()
    for one, two in zip(job.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_step_that_calls_that_of_its_parent_is_made_once() -> None:
    job = Job(kind=Inherits)
    for _ in range(3):
        job.optimizer.zero_grad()
        job.step()
        assert due(job) == [True] * 4
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected(3)))
    assert len(job.optimizer.param_groups[0]["params"]) == 4


def test_pre_hooks_see_all_parameters_and_sums(job: Job) -> None:
    seen: list[tuple[int, float]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        seen.append((len(group["params"]), float(job.module[2].bias.grad.sum())))
        group["lr"] = 0.05

    job.optimizer.register_step_pre_hook(note)
    job.step()
    assert due(job) == [False] * 4  # the hook runs after that of the overlap
    job.optimizer.zero_grad()
    job.step()
    assert due(job) == [True, True, True, False]  # the hook runs first, and has read one gradient
    other = Job(lr=0.05)
    other.backward()
    assert seen[0] == (4, float(other.module[2].bias.grad.sum()))
    assert seen[1][0] == 4
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), other.expected(2)))


def test_post_hooks_see_all_parameters_after_the_step() -> None:
    job, seen = Job(), []
    job.optimizer = torch.optim.SGD(job.module.parameters(), lr=0.1, momentum=0.9)
    job.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"])))
    job.optimizer.register_step_post_hook(lambda *_: seen.append(job.module[0].weight.detach().clone()))
    assert defer_steps(job.optimizer) == ""
    job.step()
    assert seen[0] == 4
    assert torch.equal(seen[1], job.expected()[0])
    assert due(job) == [False, True, True, True]


@pytest.mark.parametrize("kind", [torch.optim.SGD, Inherits])
def test_hooks_run_as_often_as_without_overlap(kind: Any) -> None:
    job, ran = Job(kind=kind), []
    job.optimizer.register_step_post_hook(lambda *_: ran.append(1))
    job.step()
    job.overlap.settle()
    assert len(ran) == (2 if kind is Inherits else 1)  # the step of the parent runs them too
    assert all(map(torch.equal, job.module.parameters(), job.expected()))


def test_a_scheduler_in_another_thread_never_sees_parts(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = step_overlap.make_steps, []

    def look(late: Any) -> None:
        seen.append(len(job.optimizer.param_groups[0]["params"]))
        real(late)

    monkeypatch.setattr(step_overlap, "make_steps", look)
    job.step()
    job.overlap.settle()
    assert set(seen) == {4}


def test_a_closure_computes_the_gradients_of_the_step(job: Job) -> None:
    losses = []

    def closure() -> torch.Tensor:
        loss = job.module(torch.ones(2, 3)).square().sum()
        loss.backward()
        job.engine.end_backward()
        losses.append(loss)
        return loss

    assert job.optimizer.step(closure) is losses[0]
    assert due(job) == [True] * 4
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected()))


def test_steps_in_inference_and_autocast_are_the_usual_ones(job: Job) -> None:
    job.step()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        job.module(torch.ones(1, 3))
    job.optimizer.zero_grad()
    job.step()
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected(2)))


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS is not known to step parameters separately"),
        (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "Adam is differentiable"),
        (lambda parameters: replaced(torch.optim.SGD(parameters)), "another function replaced the step of SGD"),
        (lambda parameters: type("Mine", (torch.optim.SGD,), {})(parameters), "Mine is not known"),
        (
            lambda parameters: type("Mine", (torch.optim.SGD,), {"steps_parameters_separately": True})(parameters),
            "",
        ),
        (lambda parameters: type("Mine", (Inherits,), {})(parameters), "Mine is not known"),
    ],
)
def test_optimizers_that_cannot_step_parts(optimizer: Callable[..., Any], reason: str) -> None:
    found = defer_steps(optimizer(nn.Linear(2, 2).parameters()))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer
