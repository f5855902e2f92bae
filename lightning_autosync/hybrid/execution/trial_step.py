"""Steps of optimizers that leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.workload.preservation import preserved


@contextmanager
def trial_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context of a step of an optimizer; its end restores the settings in the optimizer's groups and its state.

    The optimizer may be the one that trains, if the model keeps it. Groups are restored because some optimizers count
    their steps there.

    Args:
        parameters: the parameters that have gradients. They are not restored.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state, stepped = dict(optimizer.state), set(parameters)
    # The step leaves the state of other parameters alone; only entries for no parameter may be of all of them.
    changed = [value for key, value in state.items() if key in stepped or not isinstance(key, Tensor)]
    try:
        with preserved(groups, changed):
            yield
    finally:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _become(group, {"params": group["params"], **before})
        _become(optimizer.state, state)


def _become(values: dict[Any, Any], before: dict[Any, Any]) -> None:
    values.clear()
    values.update(before)
