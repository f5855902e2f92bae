"""`StaleReads` and `StaleStates` find who reads memory or the optimizer's state of a parameter whose step is due.

Such readers do not ask the parameter's own class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_autosync.engine.due_parameter import Due, due_of
from lightning_autosync.errors import ExchangeError


class StaleReads(TorchDispatchMode):
    """A mode in which every operator checks whether the memory that it reads or writes has a step due; slow.

    Args:
        module: the module; its parameters do not move in memory.

    Attributes:
        paused: whether operators are not checked.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.paused = False
        self._parameters = list(module.named_parameters())
        self._places: list[tuple[int, int]] = [_place(parameter) for _, parameter in self._parameters]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not (func.is_view or self.paused):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._check(tensor, func)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: Tensor, func: Any) -> None:
        start, stop = _place(tensor)
        for (name, parameter), (first, last) in zip(self._parameters, self._places, strict=True):
            if start < last and first < stop and _step_due(parameter) is not None:
                raise ExchangeError(
                    f"{func} uses the memory of parameter '{name}' before its deferred optimizer step; use the "
                    "parameter itself, or call strategy.settle() first"
                )


class StaleStates(defaultdict[Any, Any]):
    """The ``state`` of an optimizer. It raises an error if it is read for a parameter whose step is due.

    After a failure it raises none, because the step is never made and frameworks still move states to other devices.
    Copies by ``deepcopy`` and ``pickle`` are plain.
    """

    def __getitem__(self, parameter: Any) -> Any:
        self._check(parameter)
        return super().__getitem__(parameter)

    def get(self, parameter: Any, default: Any = None) -> Any:
        self._check(parameter)
        return super().get(parameter, default)

    def items(self) -> Any:
        self._check(*self)
        return super().items()

    def values(self) -> Any:
        self._check(*self)
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())

    def _check(self, *parameters: Any) -> None:
        for parameter in parameters:
            due = _step_due(parameter)
            if due is not None and due.owner.failure is None:
                raise ExchangeError(
                    f"optimizer.state is read for a parameter of shape {tuple(parameter.shape)} before its deferred "
                    "optimizer step; use optimizer.state_dict(), or call strategy.settle() first"
                )


def _step_due(parameter: Any) -> Due | None:
    """What is due for a parameter, if that is a step that is not being made."""
    due = due_of(parameter)
    return None if due is None or due.step is None or due.stepping else due


def _place(tensor: Tensor) -> tuple[int, int]:
    """First address of the elements of a tensor, and the end of the last one."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
