"""A step that is due for a parameter is made before anything reads the parameter."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapping import Job, SlowEngine, due
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_autosync.engine import StepOverlap, defer_steps, loss_scaler, step_overlap
from lightning_autosync.engine.due_parameter import DueParameter, due_of
from lightning_autosync.errors import ExchangeError

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
    "functional_call": lambda job: torch.func.functional_call(
        job.module[0], dict(job.module[0].named_parameters()), torch.ones(1, 3)
    ),
    "a compiled function": lambda job: compiled(torch.ones(1, 3), job.module[0].weight),
    "another thread": lambda job: in_thread(lambda: job.module[0].weight.sum()),
}


@torch.compile(backend="eager")
def compiled(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(inputs, weight).sum()


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


def test_a_reader_that_waits_makes_the_steps_whose_sums_have_come(job: Job) -> None:
    for _ in range(2):
        job.engine.late = {0, 2}
        job.backward()
        job.engine.finished.clear()
        job.optimizer.step()
        job.optimizer.zero_grad()
        assert job.module[0].weight.sum() != 0
        assert job.engine.finished == [1, 3, 0]
        assert due(job) == [False, False, True, False]
    job.overlap.settle()
    for own, expected in zip(job.module.parameters(), job.expected(2), strict=True):
        assert torch.equal(own, expected)


def test_all_steps_may_be_made_with_one_that_is_made_while_a_reader_waits(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is if this message tells that some rank's parameters have changed."""
    finish = job.engine.finish_message

    def finish_all(index: int) -> None:
        for each in (index, *(other for other in [*job.engine.pending] if other != index)):
            finish(each)
        job.overlap.release()
        # The plan that follows has no messages with these indices.
        monkeypatch.setattr(job.engine, "has_come", [].__getitem__)

    job.engine.late = {0}
    job.step()
    monkeypatch.setattr(job.engine, "finish_message", finish_all)
    assert torch.equal(job.module[0].weight, job.expected()[0])
    assert due(job) == [False] * 4
    assert job.engine.finished == [1, 0, 2, 3]
    for own, expected in zip(job.module.parameters(), job.expected(), strict=True):
        assert torch.equal(own, expected)


class SeparateSGD(torch.optim.SGD):
    steps_parameters_separately = True


def test_steps_of_a_users_class_are_made_in_the_order_of_their_readers() -> None:
    """They may draw random numbers, and sums come in different orders on different ranks."""
    job = Job(kind=SeparateSGD)
    job.engine.late = {0}
    job.step()
    assert job.module[0].weight.sum() != 0
    assert job.engine.finished == [0]


def test_a_reader_that_waits_completes_no_other_message_before_the_step(job: Job) -> None:
    job.engine.late = {0}
    job.backward()
    assert job.module[0].weight.grad is not None
    assert job.engine.finished == [0]
    assert due(job) == [False, True, True, True]


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


def test_each_function_that_reads_gradients_before_the_step_is_named_once(job: Job) -> None:
    for _ in range(2):
        job.backward()
        nn.utils.clip_grad_norm_(job.module.parameters(), 1e9)
        job.optimizer.step()
        job.backward()
        assert job.module[0].weight.grad is not None
        job.optimizer.step()
    assert [reader.split()[0] for reader in job.readers] == [
        "clip_grad_norm_",
        "test_each_function_that_reads_gradients_before_the_step_is_named_once",
    ]


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


def test_a_step_is_never_compiled_with_its_reader() -> None:
    """Adam rounds otherwise in steps that are compiled."""
    job = Job(kind=torch.optim.Adam)
    read = torch.compile(lambda: nn.functional.linear(torch.ones(2, 3), job.module[0].weight).sum(), backend="eager")
    for _ in range(5):
        job.step()
        job.optimizer.zero_grad()
        read()
        assert not due(job)[0]
    job.overlap.settle()
    assert all(map(torch.equal, job.module.parameters(), job.expected(5)))


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


def test_a_saved_module_has_nothing_of_the_overlap(job: Job) -> None:
    job.step()
    assert b"lightning_autosync" not in pickle.dumps(job.module)


def test_reads_past_the_class_are_found() -> None:
    job = Job(check_reads=True)
    alias = job.module[2].weight.data
    job.step()
    with pytest.raises(ExchangeError, match=r"aten.sum.default uses the memory of parameter '2.weight'"):
        alias.sum()
    job.overlap.settle()
    alias.sum()
    job.overlap.close()


STATES: dict[str, Callable[[Job], Any]] = {
    "of a parameter": lambda job: job.optimizer.state[job.module[2].weight],
    "get": lambda job: job.optimizer.state.get(job.module[2].weight),
    "items": lambda job: list(job.optimizer.state.items()),
    "values": lambda job: list(job.optimizer.state.values()),
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("reader", STATES)
def test_reads_of_the_state_of_the_optimizer_are_found(reader: str, loaded: bool) -> None:
    job = Job(check_reads=True)
    for _ in range(2):
        job.step()
        job.optimizer.zero_grad()
    if loaded:
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        job.step()
    with pytest.raises(
        ExchangeError,
        match=r"optimizer.state is read for a parameter of shape \(\d.* before its deferred optimizer step",
    ):
        STATES[reader](job)
    assert due(job) == [True] * 4
    job.overlap.settle()
    STATES[reader](job)
    assert all(map(torch.equal, job.module.parameters(), job.expected(3 if loaded else 2)))
    job.overlap.close()


@pytest.mark.parametrize("reader", STATES)
def test_the_state_of_the_optimizer_can_be_read_after_a_failure(reader: str) -> None:
    job = Job(check_reads=True)
    for _ in range(2):
        job.step()
    job.engine.failure = ExchangeError("rank 1 is lost")
    job.overlap.close()
    assert due(job) == [True] * 4
    STATES[reader](job)


def test_a_copied_optimizer_has_nothing_of_the_overlap() -> None:
    job = Job(check_reads=True)
    for _ in range(2):
        job.step()
    with pytest.raises(ExchangeError, match=r"optimizer.state is read for a parameter"):
        copy.deepcopy(job.optimizer.state)
    job.overlap.settle()
    assert b"lightning_autosync" not in pickle.dumps(job.optimizer)
    other = copy.deepcopy(job.optimizer)
    assert type(other.state) is defaultdict
    assert len(other.state) == 4
    assert other.state["a new parameter"] == {}
    job.overlap.close()


def test_modes_end_with_the_overlap() -> None:
    job = Job(check_reads=True)
    job.overlap.close()
    assert _get_current_dispatch_mode() is None


def test_parameters_have_their_own_class_again(job: Job) -> None:
    job.step()
    assert type(job.module[0].weight) is DueParameter
    job.overlap.settle()
    assert type(job.module[0].weight) is nn.Parameter
    assert vars(job.module[0].weight) == {}


def test_the_work_of_a_step_grows_with_the_parameters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(step_overlap, "due_of", lambda parameter: calls.append(parameter) or due_of(parameter))

    def looks(layers: int) -> int:
        module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers)))
        engine, overlap = SlowEngine(module), StepOverlap(module)
        overlap.follow(engine)  # type: ignore[arg-type]
        module(torch.ones(1, 1)).sum().backward()
        engine.end_backward()
        calls.clear()
        overlap.settle()
        overlap.close()
        return len(calls)

    assert looks(40) == 2 * looks(20) > 0


def test_a_scaler_without_the_method_that_is_replaced_reads_all_gradients_itself(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scaler, "_UNSCALES", "_unscale_by_another_name")
    scaler = torch.amp.GradScaler("cpu")
    with loss_scaler.unscaling_later(scaler, job.overlap):
        assert "_unscale_by_another_name" not in vars(scaler)
