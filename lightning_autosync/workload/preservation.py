"""Runs a module without changing its state."""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Undo = Callable[[], None]


@contextmanager
def preserved(*objects: Any, without: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore modules, tensors and the random generators at the end of the block, also after an error.

    This restores values and identities of everything that ``objects`` reach through attributes of modules and
    optimizers and plain containers: parameters, buffers, training modes, counters, lists, metric states. State behind
    other objects (an open file, a trainer) is not restored. Gradients are set aside, so every tensor starts the block
    without one. The cost is one copy of every tensor.

    Args:
        objects: objects to restore.
        without: tensors to leave to the caller.
    """
    with _preserved_random_state(), ExitStack() as undo:
        _remember(objects, undo, {id(tensor) for tensor in without})
        yield


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        stack.enter_context(torch.random.fork_rng(devices))
        yield


def _remember(objects: tuple[Any, ...], undo: ExitStack, seen: set[int]) -> None:
    """Register callbacks in ``undo`` that restore the current state of everything that ``objects`` reach."""
    pending = list(objects)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            undo.callback(_remember_tensor(value))
        elif isinstance(value, torch.Generator):
            undo.callback(value.set_state, value.get_state())
        elif isinstance(value, nn.Module | Optimizer):
            pending.append(vars(value))
        elif isinstance(value, dict):
            undo.callback(_remember_dict(value))
            pending.extend(value.values())
        elif isinstance(value, list | deque | set):
            undo.callback(_remember_items(value))
            pending.extend(value)
        elif isinstance(value, tuple):
            pending.extend(value)


def _remember_tensor(tensor: Tensor) -> Undo:
    copy = tensor.detach().clone()
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if is_leaf else None
    if is_leaf:
        tensor.grad = None

    @torch.no_grad()
    def restore() -> None:
        if not (tensor.layout is torch.strided and torch.equal(tensor, copy)):
            tensor.copy_(copy)
        if is_leaf:
            if not tensor.is_leaf:
                tensor.detach_()
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient

    return restore


def _remember_dict(values: dict[Any, Any]) -> Undo:
    before = dict(values)

    def restore() -> None:
        # Most dictionaries are attributes of modules that no step changes; those stay untouched.
        if list(values) != list(before) or not all(map(operator.is_, values.values(), before.values())):
            values.clear()
            values.update(before)

    return restore


def _remember_items(values: list[Any] | deque[Any] | set[Any]) -> Undo:
    before = list(values)

    def restore() -> None:
        values.clear()
        values.update(before) if isinstance(values, set) else values.extend(before)

    return restore
