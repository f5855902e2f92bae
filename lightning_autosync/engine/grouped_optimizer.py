"""Optimizers that step message by message, so that communication overlaps with the next forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_autosync.engine.engine import Engine


class GroupedOptimizer:
    """One optimizer per message, stepped right before a module that holds the message's parameters runs.

    The result equals that of a step after backward: modules see updated parameters, and the next pass accumulates
    gradients after the step. Only calls of modules trigger a step. Call `finish` before parameters are read in another
    way (``other.weight``).

    Args:
        engine: an engine with ``waits="parameters"``.
        module: the module whose parameters the engine synchronizes.
        make: makes an optimizer for the parameters of one message, for example ``functools.partial(SGD, lr=0.1)``. Its
            update rule must treat each parameter separately; clipping by the norm of all gradients is not possible.

    Attributes:
        optimizers: one per message, in schedule order; for learning rates and checkpoints.
    """

    def __init__(self, engine: Engine, module: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._engine = engine
        self._due: set[int] = set()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        members = [[parameters[name] for name in message.variables] for message in engine.schedule.messages]
        self.optimizers = [make(of_message) for of_message in members]
        homes = {parameter: index for index, of_message in enumerate(members) for parameter in of_message}
        self._handles = []
        for part in module.modules():
            needed = sorted({homes[own] for own in part.parameters(recurse=False) if own in homes})
            if needed:
                self._handles.append(part.register_forward_pre_hook(self._hook(needed)))

    def step(self) -> None:
        """Call this after each synchronized backward pass; each message is applied when its parameters are needed."""
        self._due = set(range(len(self.optimizers)))

    def finish(self) -> None:
        """Apply all pending gradients; call this before parameters are saved, evaluated, or read in another way.

        Raises:
            ExchangeError: a peer was lost or did not answer in time.
        """
        for index in sorted(self._due):
            self._apply(index)

    def close(self) -> None:
        """Apply all pending gradients and remove the hooks."""
        self.finish()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, needed: list[int]) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            for index in needed:
                self._apply(index)

        return before_forward

    def _apply(self, index: int) -> None:
        if index not in self._due:
            return
        self._due.remove(index)
        self._engine.finish_message(index)
        self.optimizers[index].step()
        self.optimizers[index].zero_grad()
