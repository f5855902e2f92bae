"""Values that a ``training_step`` logs for each part of a batch, which are logged once for the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autosync.strategy.first_batch import logging_to

_FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}
"""How values of parts become that of the batch, where they do not become a mean."""


@dataclass
class _Entry:
    """What parts of a batch logged under one name: values, their weights, and the other arguments of the last call."""

    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sizes: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class PartLogs:
    """Collects what the parts of a batch log. A mean is weighted by the terms of the parts, or by their ``batch_size``.

    Args:
        module: the user's module, whose ``log`` and ``log_dict`` are replaced within `part`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entries: dict[tuple[nn.Module, str], _Entry] = {}

    @contextmanager
    def part(self, weight: float) -> Iterator[None]:
        """The context of a part. What it logs does not count if it raises an error.

        Args:
            weight: share of the part in the terms of the loss of the batch.
        """
        kept: list[tuple[nn.Module, str, Any, dict[str, Any]]] = []

        def keep(module: nn.Module, name: str, value: Any, *args: Any, **options: Any) -> None:
            detached = value.detach() if isinstance(value, Tensor) else value
            kept.append((module, name, detached, _named(module, args, options)))

        with logging_to(self._module, keep):
            yield
        for module, name, value, options in kept:
            entry = self._entries.setdefault((module, name), _Entry())
            entry.options, size = options, options.get("batch_size")
            entry.sizes += size or 0
            entry.values.append(value)
            entry.weights.append(weight if size is None else float(size))

    def log(self) -> None:
        """Log the values of the batch."""
        for (module, name), entry in self._entries.items():
            options = {**entry.options, "batch_size": entry.sizes} if entry.sizes else entry.options
            module.log(name, _of_batch(entry), **options)  # type: ignore[operator]


def _named(module: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module's ``log`` by name, without the name and the value that are logged."""
    signatures = (inspect.signature(vars(each)["log"]) for each in type(module).__mro__ if "log" in vars(each))
    # An override with *args passes them to the method of a base class, which names them.
    signature = next(
        each for each in signatures if all(one.kind is not one.VAR_POSITIONAL for one in each.parameters.values())
    )
    names = list(signature.parameters)[3:]
    given = signature.bind_partial(module, None, None, *args).arguments
    return {**{name: given[name] for name in names if name in given}, **options}


def _of_batch(entry: _Entry) -> Any:
    """The value of a batch; a metric object has counted all parts already."""
    last = entry.values[-1]
    if not isinstance(last, Tensor | Number):
        return last
    values = torch.stack([torch.as_tensor(value) for value in entry.values])
    kind = entry.options.get("reduce_fx", "mean")
    fold = _FOLDS.get(kind if isinstance(kind, str) else getattr(kind, "__name__", ""))
    if fold is not None:
        return fold(values)
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    weights = torch.tensor(entry.weights, dtype=values.dtype, device=values.device)
    return torch.tensordot(weights, values, 1) / weights.sum()
