"""A step that is due for a parameter is made before anything reads the parameter."""

from __future__ import annotations

import atexit
import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_autosync.engine import StepOverlap, defer_steps, optimizer_steps, step_overlap
from lightning_autosync.engine.due_parameter import Due, DueParameter, due_of, mark, unmark
from lightning_autosync.engine.step_overlap import _apply
from lightning_autosync.errors import ExchangeError


class SlowEngine:
    """Stands in for an engine: one message per parameter, whose sums are ten times the local gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.on_launch: Callable[[], None] | None = None
        self.before_pass: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self.finished: list[int] = []
        self.pending: list[int] = []
        self._parameters = list(module.parameters())

    def members(self, index: int) -> list[nn.Parameter]:
        return [self._parameters[index]]

    def end_backward(self) -> None:
        self.pending = list(range(len(self._parameters)))
        assert self.on_launch is not None
        self.on_launch()

    def finish_message(self, index: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.pending.remove(index)
        self.finished.append(index)
        gradient = self._parameters[index].grad
        assert gradient is not None
        gradient.mul_(10)


class Job:
    """A model, its optimizer, and an engine whose passes overlap."""

    def __init__(self, check_reads: bool = False, kind: Any = torch.optim.SGD, **settings: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.settings = {"kind": kind, **settings}
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = kind(self.module.parameters(), **{"lr": 0.1, **momentum, **settings})
        self.engine = SlowEngine(self.module)
        self.readers: list[str] = []
        self.overlap = StepOverlap(self.module, check_reads, self.readers.append)
        self.overlap.follow(self.engine)  # type: ignore[arg-type]
        assert defer_steps(self.optimizer) == ""

    def backward(self) -> None:
        self.overlap.settle()
        self.module(torch.ones(2, 3)).square().sum().backward()
        self.engine.end_backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def expected(self, steps: int = 1) -> list[torch.Tensor]:
        """The weights after so many steps of another job, without overlap."""
        other = Job(**self.settings)
        for _ in range(steps):
            other.optimizer.zero_grad()
            other.module(torch.ones(2, 3)).square().sum().backward()
            for parameter in other.module.parameters():
                parameter.grad.mul_(10)
            other.optimizer.step()
        return [parameter.detach() for parameter in other.module.parameters()]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.overlap.close()


def due(job: Job) -> list[bool]:
    return [due_of(parameter) is not None for parameter in job.module.parameters()]


READERS: dict[str, Callable[[Job], Any]] = {
    "operator": lambda job: job.module[0].weight + 1,
    "method": lambda job: job.module[0].weight.sum(),
    "function": lambda job: nn.functional.linear(torch.ones(1, 3), job.module[0].weight),
    "data": lambda job: job.module[0].weight.data,
    "numpy": lambda job: job.module[0].weight.detach().numpy(),
    "list": lambda job: torch.cat([job.module[0].weight.view(-1), torch.ones(1)]),
    "keyword": lambda job: torch.add(input=torch.ones(4, 3), other=job.module[0].weight),
    "gradient": lambda job: job.module[0].weight.grad,
    "deepcopy": lambda job: copy.deepcopy(job.module),
    "pickle": lambda job: pickle.dumps(job.module[0].weight),
    "save": lambda job: torch.save(job.module, io.BytesIO()),
    "state_dict": lambda job: job.module.state_dict(),
    "repr": lambda job: repr(job.module[0].weight),
    "item": lambda job: job.module[0].weight.tolist(),
    "vector": lambda job: nn.utils.parameters_to_vector(job.module.parameters()),
    "pointer": lambda job: job.module[0].weight.data_ptr(),
    "freezing": lambda job: job.module[0].weight.requires_grad_(False),
    "in place": lambda job: nn.init.zeros_(job.module[0].weight),
    "module": lambda job: job.module[0](torch.ones(1, 3)),
    "state of the optimizer": lambda job: job.optimizer.state_dict(),
    "new state of the optimizer": lambda job: job.optimizer.load_state_dict(job.optimizer.state_dict()),
    "another optimizer": lambda job: torch.optim.Adamax(job.module.parameters(), lr=0.0).step(),
    "a transformed function": lambda job: torch.func.grad(lambda inputs: job.module(inputs).sum())(torch.ones(1, 3)),
    "another thread": lambda job: in_thread(lambda: job.module[0].weight.sum()),
}


def in_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_makes_the_step_first(job: Job, reader: str) -> None:
    job.step()
    assert due(job) == [True] * 4
    READERS[reader](job)
    assert not due(job)[0]
    assert 0 in job.engine.finished
    if reader != "in place":
        assert torch.equal(job.module[0].weight, job.expected()[0])


def test_what_tells_nothing_of_the_values_waits_for_nothing(job: Job) -> None:
    job.step()
    for parameter in job.module.parameters():
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.shape.numel() == parameter.numel()
        assert (parameter.dtype, parameter.device.type, parameter.dim()) == (torch.float32, "cpu", parameter.ndim)
        assert isinstance(parameter, nn.Parameter)
    assert len(set(job.module.parameters())) == 4
    assert due(job) == [True] * 4
    assert job.engine.finished == []


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


def test_settings_are_those_of_the_time_of_the_step(job: Job) -> None:
    job.step()
    job.optimizer.param_groups[0]["lr"] = 100.0
    assert torch.equal(job.module[2].bias, job.expected()[3])
    assert job.optimizer.param_groups[0]["lr"] == 100.0
    assert list(map(id, job.optimizer.param_groups[0]["params"])) == list(map(id, job.module.parameters()))


def test_gradients_read_before_the_step_are_sums(job: Job) -> None:
    job.backward()
    total = nn.utils.clip_grad_norm_(job.module.parameters(), 1e9)
    assert due(job) == [False] * 4
    assert job.engine.finished == [0, 1, 2, 3]
    other = Job()
    other.module(torch.ones(2, 3)).square().sum().backward()
    assert torch.allclose(total, 10 * nn.utils.get_total_norm([each.grad for each in other.module.parameters()]))
    (reader,) = job.readers
    assert reader.startswith("clip_grad_norm_ (clip_grad.py:")


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


class Inherits(torch.optim.SGD):
    """A step that logs, for instance, and calls that of its parent."""

    steps_parameters_separately = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_calls_that_of_its_parent_is_made_once() -> None:
    job = Job(kind=Inherits)
    for _ in range(3):
        job.optimizer.zero_grad()
        job.step()
        assert due(job) == [True] * 4
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected(3)))
    assert len(job.optimizer.param_groups[0]["params"]) == 4


def test_a_step_that_raises_is_not_made_later(job: Job) -> None:
    handle = job.optimizer.register_step_pre_hook(_raise)
    with pytest.raises(ValueError, match="no logger"):
        job.step()
    handle.remove()
    job.module.zero_grad()
    job.step()
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected()))
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


class Raises(torch.optim.SGD):
    """Its step fails once."""

    steps_parameters_separately = True
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no memory")
        return super().step(closure)


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
        patched.setattr(step_overlap, "make_steps", _raise)
        with pytest.raises(ValueError, match="no logger"):
            job.module(torch.ones(1, 3))
    for read in (lambda: job.module[0].weight.sum(), lambda: job.module[2].bias.sum(), job.overlap.settle):
        with pytest.raises(ExchangeError, match=r"last step could not be made \(ValueError: no logger\)"):
            read()


def test_freezing_before_the_step_waits_for_the_sum(job: Job) -> None:
    job.backward()
    job.module.requires_grad_(False)
    assert due(job) == [False] * 4
    assert job.engine.finished == [0, 1, 2, 3]


def test_another_thread_waits_while_a_parameter_is_completed(job: Job) -> None:
    job.step()
    begun, go, seen = threading.Event(), threading.Event(), []
    finish = job.engine.finish_message

    def slow(index: int) -> None:
        begun.set()
        assert go.wait(10)
        finish(index)

    job.engine.finish_message = slow  # type: ignore[method-assign]
    first = threading.Thread(target=job.overlap.settle)
    second = threading.Thread(target=lambda: seen.append(job.module[0].weight.detach().clone()))
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.1)
    assert seen == []
    go.set()
    first.join()
    second.join()
    assert torch.equal(seen[0], job.expected()[0])


def test_a_scheduler_in_another_thread_never_sees_parts(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = step_overlap.make_steps, []

    def look(late: Any) -> None:
        seen.append(len(job.optimizer.param_groups[0]["params"]))
        real(late)

    monkeypatch.setattr(step_overlap, "make_steps", look)
    job.step()
    job.overlap.settle()
    assert set(seen) == {4}


def test_evaluation_of_a_part_takes_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, job = [], Job()
    job.module = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    job.module.eval()
    engine, overlap = SlowEngine(job.module), StepOverlap(job.module)
    overlap.follow(engine)  # type: ignore[arg-type]
    job.optimizer = torch.optim.SGD(job.module.parameters(), lr=0.1)
    defer_steps(job.optimizer)
    real = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: fast.append(1) or real(*args))
    job.module(torch.ones(1, 4, 8)).sum().backward()
    engine.end_backward()
    job.optimizer.step()
    assert all(due(job))
    with torch.no_grad():
        job.module(torch.ones(1, 4, 8))
    assert fast == [1]
    overlap.close()


def test_a_step_is_never_recorded_by_a_trace(job: Job) -> None:
    job.step()
    with pytest.raises(ExchangeError, match=r"torch.jit.trace would record .* call strategy.settle\(\)"):
        torch.jit.trace(job.module, torch.ones(1, 3), check_trace=False)
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected()))


def test_gradients_cleared_to_none_stay_none(job: Job) -> None:
    job.step()
    job.optimizer.zero_grad()
    job.module.zero_grad(set_to_none=False)
    job.overlap.settle()
    assert [parameter.grad for parameter in job.module.parameters()] == [None] * 4


class Marked(torch.Tensor):
    """A class of a user's own tensors."""


def test_other_classes_of_tensors_see_calls(job: Job) -> None:
    job.backward()
    inputs = torch.ones(1, 3).as_subclass(Marked)
    assert type(nn.functional.linear(inputs, job.module[0].weight)) is Marked


def test_one_message_shows_whether_parameters_changed(job: Job) -> None:
    job.step()
    job.overlap.notice_change()
    assert len(job.engine.finished) == 1
    job.overlap.settle()
    job.overlap.notice_change()
    assert len(job.engine.finished) == 4


def test_an_overlap_ends_also_after_an_unknown_error(job: Job) -> None:
    job.step()
    job.engine.failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        job.overlap.close()
    assert job.engine.on_launch is None
    assert job.overlap._handle.id not in torch.nn.modules.module._global_forward_pre_hooks


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


def test_a_saved_module_has_nothing_of_the_overlap(job: Job) -> None:
    job.step()
    assert b"lightning_autosync" not in pickle.dumps(job.module)


def _raise(*_: Any) -> None:
    raise ValueError("no logger")


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


def test_reads_past_the_class_are_found() -> None:
    job = Job(check_reads=True)
    alias = job.module[2].weight.data
    job.step()
    with pytest.raises(ExchangeError, match=r"aten.sum.default uses the memory of parameter '2.weight'"):
        alias.sum()
    job.overlap.settle()
    alias.sum()
    job.overlap.close()


def test_modes_end_with_the_overlap() -> None:
    job = Job(check_reads=True)
    job.overlap.close()
    assert _get_current_dispatch_mode() is None


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


def test_parameters_have_their_own_class_again(job: Job) -> None:
    job.step()
    assert type(job.module[0].weight) is DueParameter
    job.overlap.settle()
    assert type(job.module[0].weight) is nn.Parameter
    assert vars(job.module[0].weight) == {}
