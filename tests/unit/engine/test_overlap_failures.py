"""Steps that are due and fail: readers get an error, and nothing is made twice."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapping import Job, due, refuse

from lightning_autosync.engine import step_overlap
from lightning_autosync.errors import ExchangeError


class Raises(torch.optim.SGD):
    """Its step fails once."""

    steps_parameters_separately = True
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no memory")
        return super().step(closure)


def test_a_step_that_raises_is_not_made_later(job: Job) -> None:
    handle = job.optimizer.register_step_pre_hook(refuse)
    with pytest.raises(ValueError, match="no logger"):
        job.step()
    handle.remove()
    job.module.zero_grad()
    job.step()
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected()))
    assert len(job.optimizer.param_groups[0]["params"]) == 4


def test_an_optimizer_is_whole_after_a_step_that_raises() -> None:
    job = Job(kind=Raises)
    with pytest.raises(ValueError, match="no memory"):
        job.step()
    assert len(job.optimizer.param_groups[0]["params"]) == 4
    job.optimizer.zero_grad()
    assert [parameter.grad for parameter in job.module.parameters()] == [None] * 4


def test_a_deferred_step_that_raises_is_an_error_for_all_readers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step()
    with monkeypatch.context() as patched:
        patched.setattr(step_overlap, "make_steps", refuse)
        with pytest.raises(ValueError, match="no logger"):
            job.module(torch.ones(1, 3))
    for read in (lambda: job.module[0].weight.sum(), lambda: job.module[2].bias.sum(), job.overlap.settle):
        with pytest.raises(ExchangeError, match=r"last step could not be made \(ValueError: no logger\)"):
            read()


def test_an_overlap_ends_also_after_an_unknown_error(job: Job) -> None:
    job.step()
    job.engine.failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        job.overlap.close()
    assert job.engine.on_launch is None
    assert job.overlap._hooks
    registered = torch.nn.modules.module._global_forward_pre_hooks
    assert not any(handle.id in registered for handle in job.overlap._hooks)


def test_a_script_that_ends_makes_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", lambda call: call in registered and registered.remove(call))
    job = Job()
    job.step()
    with monkeypatch.context() as failed:
        failed.setattr(sys, "last_value", ValueError("ended the script"), raising=False)
        registered[-1]()
        assert due(job) == [True] * 4
    registered[-1]()
    assert due(job) == [False] * 4
    job.overlap.close()
    assert registered == []


def test_readers_fail_where_the_step_cannot_be_made(job: Job) -> None:
    job.step()
    old = [parameter.detach().clone() for parameter in Job().module.parameters()]
    job.engine.failure = ExchangeError("rank 1 is lost")
    for read in (lambda: job.module[0].weight.sum(), lambda: job.module.state_dict(), job.overlap.settle):
        with pytest.raises(ExchangeError, match="rank 1 is lost"):
            read()
    job.overlap.close()
    with pytest.raises(ExchangeError, match="rank 1 is lost"):
        job.module[2].bias.sum()
    with torch._C.DisableTorchFunctionSubclass():
        assert all(map(torch.equal, job.module.parameters(), old))


def test_an_interrupted_reader_may_try_again(job: Job) -> None:
    job.step()
    job.engine.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        job.module[0].weight.sum()
    job.engine.failure = None
    assert torch.equal(job.module[0].weight, job.expected()[0])
