"""Norms of summed gradients, before the sums have reached all ranks.

When the sums on the way up their trees are complete, the roots together hold the whole gradient. Each rank adds up the
squares of the parts of which it is a root, and sends these few numbers to all ranks. So ranks can clip gradients by
their norm while the sums are still on their way down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autosync.engine.collectives import group_device
from lightning_autosync.engine.gradients import MessageGradients


def gradient_norms(
    messages: Sequence[MessageGradients], refuses: bool, group: dist.ProcessGroup | None
) -> list[Tensor] | None:
    """The norms of the gradients of messages under way; collective, and the same numbers on every rank.

    Args:
        messages: messages with roots (see `MessageGradients.has_roots`), the same on every rank.
        refuses: whether this rank cannot use the norms.
        group: all ranks.

    Returns:
        float64 [number of parameters] for each message; None if some rank refuses.

    Raises:
        ExchangeError: a peer was lost or did not answer in time.
    """
    sizes = [len(each.parameters) for each in messages]
    flag = torch.full((1,), float(refuses), dtype=torch.float64, device="cpu")
    squares = [flag.new_zeros(sum(sizes))] if refuses else [each.root_squares() for each in messages]
    own = torch.cat([flag, *squares]).to(group_device(group))
    # One hop. An all-reduce takes several, and each waits behind gradients: 45 ms in place of 10 on busy links between
    # four ranks.
    parts = own.repeat(dist.get_world_size(group))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    found = received.view(-1, len(own)).sum(0).cpu()
    if found[0] > 0:
        return None
    return list(found[1:].sqrt().split(sizes))


def clip_by_norms(
    parameters: Sequence[nn.Parameter], norms: Mapping[nn.Parameter, Tensor], max_norm: float, error_if_nonfinite: bool
) -> tuple[Tensor, Tensor]:
    """Like ``torch.nn.utils.clip_grad_norm_``, for the 2-norm, where the norms of some gradients are given.

    Args:
        parameters: the parameters.
        norms: norms of gradients, scalars, by parameter; these gradients are neither read nor changed.
        max_norm: largest norm of all gradients together.
        error_if_nonfinite: whether to raise an error if that norm is not finite.

    Returns:
        The norm of all gradients, and the factor by which the caller must multiply those with given norms.

    Raises:
        RuntimeError: see ``error_if_nonfinite``.
    """
    rest = [parameter for parameter in parameters if parameter not in norms]
    # Reading a gradient whose norm is given would wait for it.
    gradients = [norms[each] if each in norms else each.grad for each in parameters]  # noqa: SIM401
    total = nn.utils.get_total_norm([each for each in gradients if each is not None], 2.0, error_if_nonfinite)
    one = nn.Parameter(torch.ones_like(total))  # which PyTorch clips like the others
    one.grad = torch.ones_like(total)
    nn.utils.clip_grads_with_norm_([*rest, one], max_norm, total)
    return total, one.grad
