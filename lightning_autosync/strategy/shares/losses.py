"""Losses for which weights by samples are wrong: means over something else, and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.shares.cuts import LOSS_WEIGHT
from lightning_autosync.strategy.shares.parts import loss_of

_MEAN, _SUM = 1, 2
"""What autograd's nodes of losses call a mean and a sum: ``torch.nn.functional._Reduction``."""
_MULTIPLIED = "MulBackward"
# No division: a sum that is divided is the usual form of a mean.
_TRANSPARENT = (
    "AddBackward", "SubBackward", "RsubBackward", "NegBackward", _MULTIPLIED, "ToCopyBackward", "CloneBackward",
    "AliasBackward",
)  # fmt: skip
"""Beginnings of the names of nodes that keep a sum a sum, and a mean a mean."""
_ADVICE = (
    f"batch shares need the mean over samples, or {LOSS_WEIGHT}(batch) of the module with the number of terms of a "
    "mean, or the sum of their weights"
)


def loss_weight_of(module: nn.Module) -> Callable[[Any], Any] | None:
    """The method of a module that counts the terms of its loss; None if its class has none."""
    return getattr(module, LOSS_WEIGHT) if callable(getattr(type(module), LOSS_WEIGHT, None)) else None


def check_loss(output: Any) -> None:
    """Refuse a loss that is the sum of a batch, and warn of what may be wrong, as far as autograd's graph tells.

    Args:
        output: the output of a training step.

    Raises:
        PlanError: the whole loss was made with ``reduction="sum"``. A term of it may be right, as a penalty on weights.
    """
    loss = loss_of(output)
    terms = [] if loss is None else list(_terms(loss))
    for node, multiplied in terms:
        name, reduction = node.name(), getattr(node, "_saved_reduction", None)
        if reduction == _SUM and not multiplied and len(terms) == 1:
            raise PlanError(f"loss: training_step returns a loss with reduction='sum' ({name}); {_ADVICE}")
        if reduction == _SUM or name.startswith("SumBackward"):
            rank_zero_warn(f"AutoSync: training_step returns a sum ({name}). If it sums over samples: {_ADVICE}")
        if reduction == _MEAN and name.startswith("NllLoss") and (reasons := _unequal_terms(node)):
            rank_zero_warn(f"AutoSync: training_step returns a mean ({name}) with {' and '.join(reasons)}: {_ADVICE}")


def _terms(loss: Tensor) -> Iterator[tuple[Node, bool]]:
    """The nodes of autograd's graph that add up to ``loss``, and whether they are multiplied by something before."""
    left, seen = [(loss.grad_fn, False)], set()
    while left:
        node, multiplied = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith(_TRANSPARENT):
            multiplied = multiplied or name.startswith(_MULTIPLIED)
            left += [(each, multiplied) for each, _ in node.next_functions]
        else:
            yield node, multiplied


def _unequal_terms(node: Any) -> list[str]:
    """Why the targets of a mean of negative log-likelihoods count differently."""
    try:
        targets, weights = node._saved_target, node._saved_weight
    except RuntimeError:  # training_step has made the backward pass, which frees them
        return []
    # Autograd keeps the index without its sign.
    ignored = bool((targets == (node._saved_ignore_index + 2**63) % 2**64 - 2**63).any())
    weighted = weights is not None and bool((weights != weights[0]).any())
    return ["ignored targets"] * ignored + ["class weights"] * weighted
