"""What stands in place of the user's module, as `DistributedDataParallel` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn


class Synchronizer(Protocol):
    """What keeps a module equal on all ranks, as far as its wrapper knows it."""

    enabled: bool

    def before_forward(self, synchronizes: bool) -> None:
        """Called before each forward pass; ``synchronizes`` if a synchronized backward pass may follow."""


class SynchronizedModule(nn.Module):
    """Every forward pass of training and validation comes by here.

    Attributes:
        module: the user's module.
        replica: what keeps it equal on all ranks.
    """

    def __init__(self, module: nn.Module, replica: Synchronizer) -> None:
        super().__init__()
        self.module = module
        self.replica = replica

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward()
        return self.module(*args, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes synchronize gradients."""
        return self.replica.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self.replica.enabled = enabled

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes only accumulate gradients on this rank."""
        return accumulation(self.replica)

    @torch.compiler.disable
    def _before_forward(self) -> None:
        # With manual optimization, buffers follow rank 0 once, as Lightning has it with DDP.
        followed = getattr(self.module, "automatic_optimization", True)
        self.replica.before_forward(followed and self.replica.enabled and torch.is_grad_enabled())


@contextmanager
def accumulation(replica: Synchronizer) -> Iterator[None]:
    """Inside, backward passes only accumulate gradients on this rank."""
    before, replica.enabled = replica.enabled, False
    try:
        yield
    finally:
        replica.enabled = before
