"""`intercepted_steps`: during training, each call of an optimizer's ``step`` goes to the replica."""

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
    """A context in which ``optimizer.step(closure)`` calls ``closure``, if given, and then ``make()``.

    This holds for Lightning's calls and for a script's own. Within ``make``, and after the context, ``optimizer.step``
    makes the optimizer's own step.

    Args:
        optimizer: the optimizer, whose ``step`` is replaced.
        stepping: returns the context of a step.
        make: makes a step with gradients that ``closure`` or the script has computed.
    """
    own, wrapped, calls_own = optimizer.step, "step" in vars(optimizer), False

    @wraps(own)
    def step(_: Optimizer, closure: Any = None, **options: Any) -> Any:
        nonlocal calls_own
        if calls_own:
            return own(**options) if closure is None else own(closure, **options)
        with stepping():
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            calls_own = True
            try:
                make()
            finally:
                calls_own = False
        return loss

    # A method, because learning-rate schedules unwrap one.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        calls_own = True  # for those who kept the replaced method, as a schedule made during training
        if wrapped:
            optimizer.step = own  # type: ignore[method-assign]
        else:
            del optimizer.step
