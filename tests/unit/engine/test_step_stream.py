"""Streams on which deferred steps are made, with a stand-in for a device's streams."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_autosync.engine import step_stream
from lightning_autosync.engine.step_stream import StepStream
from lightning_autosync.errors import ExchangeError


class Device:
    """Streams that note what they do: ``made``, the steps, and the steps for which they wait."""

    def __init__(self) -> None:
        self.streams = {name: Stream(name) for name in ("usual", "other")}
        self.current = self.streams["usual"]
        self.capturing = False
        device = self

        class Event:
            def record(self) -> None:
                self.seen = list(device.current.made)

        self.cuda = SimpleNamespace(
            Event=Event,
            current_stream=lambda _: self.current,
            is_current_stream_capturing=lambda: self.capturing,
            is_initialized=lambda: True,
            stream=self.on,
        )

    @contextmanager
    def on(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.made, self.awaited = name, [], []

    def wait_event(self, event: Any) -> None:
        self.awaited += event.seen
        self.made += event.seen


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(step_stream, "torch", SimpleNamespace(cuda=made.cuda, compiler=torch.compiler))
    return made


@pytest.fixture
def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture
def steps(module: nn.Module, device: Device) -> StepStream:
    found = StepStream(module)
    found._device = torch.device("cuda", 0)
    found.follow()
    return found


def test_steps_are_made_on_one_stream_and_readers_on_others_wait(steps: StepStream, device: Device) -> None:
    usual, other = device.streams.values()
    with device.on(other):
        with steps.stepping():
            assert device.current is usual
            usual.made.append("first")
        assert other.awaited == ["first"]
    with steps.stepping():
        usual.made.append("second")
    assert usual.awaited == []
    with device.on(other):
        steps.before_forward(nn.Linear(2, 2))
    assert other.awaited[-2:] == ["first", "second"]


def test_steps_on_a_new_stream_come_after_those_on_the_last_one(steps: StepStream, device: Device) -> None:
    usual, other = device.streams.values()
    with steps.stepping():
        usual.made.append("first")
    with device.on(other):
        steps.follow()
    assert other.awaited == ["first"]
    with steps.stepping():
        assert device.current is other
        other.made.append("second")
    assert usual.awaited == ["first", "second"]


def test_graphs_that_would_record_the_module_are_refused(steps: StepStream, module: nn.Module, device: Device) -> None:
    device.capturing = True
    for part in (module, module[1]):
        with pytest.raises(ExchangeError, match="CUDA graph"):
            steps.before_forward(part)
    with pytest.raises(ExchangeError, match="CUDA graph"), steps.stepping():
        pass
    steps.before_forward(nn.Linear(2, 2))  # of another model


def test_processes_in_which_cuda_must_not_be_initialized_are_left_alone(steps: StepStream, device: Device) -> None:
    with steps.stepping():
        pass
    device.cuda.is_initialized = lambda: False
    device.cuda.current_stream = mock.Mock(side_effect=AssertionError)
    steps.before_forward(nn.Linear(2, 2))


def test_models_on_the_cpu_have_no_stream(module: nn.Module) -> None:
    steps = StepStream(module)
    assert not steps.on_device
    with steps.stepping():
        steps.follow()
    steps.wait()
