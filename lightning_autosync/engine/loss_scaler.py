"""Gradients of a scaled loss that are unscaled when they have come.

`GradScaler` reads all gradients before the optimizer's step: it divides them by the loss scale, and skips the step if
one is not finite. The norms at the roots of their sums tell that earlier (see `gradient_norms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_autosync.engine.optimizer_steps import part_of
from lightning_autosync.engine.step_overlap import StepOverlap

_UNSCALES = "_unscale_grads_"
"""Method of `GradScaler` by which it unscales the gradients of an optimizer. PyTorch's FSDP replaces it, too."""
_SCALERS = (GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)


@contextmanager
def unscaling_later(scaler: GradScaler | None, overlap: StepOverlap) -> Iterator[None]:
    """A context in which ``scaler`` unscales gradients when they have come, where that changes nothing else.

    All ranks enter it for the same calls of ``scaler.unscale_`` and ``scaler.step``, which are collective in it. The
    scaler reads all gradients itself, and so waits for them, if it is of another class than PyTorch's, if PyTorch's has
    no such method, or if the optimizer unscales gradients in its step (fused ones do); see also
    `StepOverlap.unscale_later`.

    Args:
        scaler: the scaler; None if the loss is not scaled.
        overlap: defers the steps of the parameters.
    """
    if type(scaler) not in _SCALERS or _UNSCALES in vars(scaler) or not hasattr(scaler, _UNSCALES):
        yield
        return
    read_all = getattr(scaler, _UNSCALES)

    def unscale(optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        groups = optimizer.param_groups
        later = set()
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            later = overlap.unscale_later([each for group in groups for each in group["params"]], inverse)
        if not later:
            return dict(read_all(optimizer, inverse, found, allow_fp16))
        rest = [{**group, "params": [each for each in group["params"] if each not in later]} for group in groups]
        flags = dict(read_all(part_of(optimizer, rest), inverse, found, allow_fp16)) or {found.device: found}
        if any(float(flag) for flag in flags.values()):
            overlap.settle()  # the step is skipped, so no reader will ask for these gradients
        return flags

    own: dict[str, Any] = vars(scaler)
    own[_UNSCALES] = unscale
    try:
        yield
    finally:
        del own[_UNSCALES]
