"""Losses for which weights by samples are wrong: means over something else, and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import LOSS_WEIGHT
from lightning_autosync.strategy.shares.parts import loss_of

_SUM = 2
"""What autograd's nodes of losses call a sum: ``torch.nn.functional._Reduction``."""
_TRANSPARENT = ("AddBackward", "NegBackward", "ToCopyBackward", "CloneBackward", "AliasBackward")
"""Beginnings of the names of nodes that keep a sum a sum."""
_ADVICE = (
    f"batch shares need the mean over samples, or {LOSS_WEIGHT}(batch) of the module with the number of terms of a mean"
)


def loss_weight_of(module: nn.Module) -> Callable[[Any], Any] | None:
    """The method of a module that counts the terms of its loss; None if its class has none."""
    return getattr(module, LOSS_WEIGHT) if callable(getattr(type(module), LOSS_WEIGHT, None)) else None


def check_loss(output: Any) -> None:
    """Refuse a loss that is the sum of a batch, and warn of one that may be, as far as autograd's graph tells.

    Args:
        output: the output of a training step.

    Raises:
        PlanError: the loss was made with ``reduction="sum"``.
    """
    loss = loss_of(output)
    node = None if loss is None else loss.grad_fn
    while node is not None and node.name().startswith(_TRANSPARENT):
        node = node.next_functions[0][0]
    if node is None:
        return
    if getattr(node, "_saved_reduction", None) == _SUM:
        raise PlanError(f"loss: training_step returns a loss with reduction='sum' ({node.name()}); {_ADVICE}")
    if node.name().startswith("SumBackward"):
        rank_zero_warn(f"AutoSync: training_step returns a sum ({node.name()}). If it sums over samples: {_ADVICE}")
