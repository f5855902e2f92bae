"""An optimizer's state where servers keep it: from checkpoints to them, and back, in torch's own form.

So a checkpoint is the same whoever made the steps, and one kind of plan goes on from that of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def state_by_name(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, dict[str, Tensor]]:
    """What the optimizer remembers of each parameter, by the parameter's name, as servers take it."""
    return {
        names[parameter]: {
            key: value if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in state.items()
            if value is not None
        }
        for parameter, state in optimizer.state.items()
    }


def with_state(
    saved: dict[str, Any],
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    state: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """``optimizer.state_dict()`` (``saved``) with the servers' state, given by name."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {place: dict(state[names[each]]) for place, each in enumerate(parameters) if names[each] in state}
    return {**saved, "state": held}
