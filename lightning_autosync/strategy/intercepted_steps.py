"""Steps of an optimizer that a replica makes, whoever calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer


@contextmanager
def intercepted_steps(
    optimizer: Optimizer, stepping: Callable[[], AbstractContextManager[None]], make: Callable[[], None]
) -> Iterator[None]:
    """A context in which ``optimizer.step(closure)`` computes gradients by ``closure``, if given, and calls ``make()``.

    This includes calls of scripts that have the optimizer itself, without the framework's wrapper. Within ``make``,
    ``optimizer.step`` is the optimizer's own method.

    Args:
        optimizer: the optimizer, whose ``step`` is replaced.
        stepping: makes the context of a step.
        make: makes the step once the gradients are there.
    """
    own, wrapped, passes = optimizer.step, "step" in vars(optimizer), False

    @wraps(own)
    def step(_: Optimizer, closure: Any = None, **options: Any) -> Any:
        nonlocal passes
        if passes:
            return own(**options) if closure is None else own(closure, **options)
        with stepping():
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            passes = True
            try:
                make()
            finally:
                passes = False
        return loss

    # A method, because learning-rate schedules unwrap one.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        passes = True  # for those who kept the replaced method, as a schedule made during training
        if wrapped:
            optimizer.step = own  # type: ignore[method-assign]
        else:
            del optimizer.step
