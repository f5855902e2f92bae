"""A job whose steps overlap, without other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_autosync.engine import StepOverlap, defer_steps
from lightning_autosync.engine.due_parameter import due_of


class SlowEngine:
    """Stands in for an engine: one message per parameter, whose sums are ten times the local gradients.

    Attributes:
        late: messages whose sums have not come, so that `finish_message` would wait.
    """

    def __init__(self, module: nn.Module) -> None:
        self.on_launch: Callable[[], None] | None = None
        self.before_pass: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self.finished: list[int] = []
        self.late: set[int] = set()
        self.pending: list[int] = []
        self._parameters = list(module.parameters())

    def members(self, index: int) -> list[nn.Parameter]:
        return [self._parameters[index]]

    def has_come(self, index: int) -> bool:
        return index not in self.late

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
        assert defer_steps(self.optimizer, check_reads) == ""

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


def due(job: Job) -> list[bool]:
    return [due_of(parameter) is not None for parameter in job.module.parameters()]


class Inherits(torch.optim.SGD):
    """A step that logs, for instance, and calls that of its parent."""

    steps_parameters_separately = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refuse(*_: Any) -> None:
    raise ValueError("no logger")
