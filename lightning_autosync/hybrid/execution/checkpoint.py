"""Converts states of split models and their optimizers to those of the unsplit model, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.execution.shards import Shard
from lightning_autosync.hybrid.execution.split_model import SplitModel


def model_state(split: SplitModel, keep: bool) -> dict[str, Any]:
    """The ``state_dict()`` of the unsplit module, on the CPU; collective.

    Args:
        split: the split model.
        keep: whether to return it on this rank; other ranks return an empty one.
    """
    parts = {part.parameter.data_ptr(): part.shard for part in split.parts.values() if part.shard.cuts}
    found = {}
    for name, value in split.module.state_dict().items():
        shard = parts.get(value.data_ptr()) if isinstance(value, Tensor) else None
        whole = value if shard is None else split.whole(value.detach(), shard)
        if keep:
            found[name] = _on_cpu(whole)
    return found


def load_model_state(split: SplitModel, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a ``state_dict()`` of the unsplit module; each rank takes its parts."""
    parts = {part.parameter: part.shard for part in split.parts.values()}
    shards = {name: parts[parameter] for name, parameter in split.module.named_parameters(remove_duplicate=False)}
    split.module.load_state_dict(
        {name: _cut(name, value, shards.get(name)) for name, value in state.items()}, strict=strict
    )


def optimizer_state(split: SplitModel, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer of the unsplit module, on the CPU; collective.

    Args:
        split: the split model.
        optimizer: an optimizer of its parameters.
        keep: whether to return it on this rank; other ranks return an empty one.

    Raises:
        PlanError: the optimizer keeps tensors with other shapes than the parameters', so it is unknown how to merge the
            ranks' parts.
    """
    saved = optimizer.state_dict()
    found: dict[int, dict[str, Any]] = {}
    for index, shard in enumerate(_shards(split, optimizer)):
        entries = saved["state"].get(index)
        if entries is None:
            continue
        whole = {key: _whole(split, key, value, shard) for key, value in entries.items()}
        if keep:
            found[index] = {key: _on_cpu(value) for key, value in whole.items()}
    return {"state": found, "param_groups": saved["param_groups"]} if keep else {}


def load_optimizer_state(split: SplitModel, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a ``state_dict()`` of an optimizer of the unsplit module; each rank takes its parts."""
    shards = list(_shards(split, optimizer))
    cut = {
        index: {key: _cut(key, value, shards[index]) for key, value in entries.items()}
        for index, entries in state["state"].items()
    }
    optimizer.load_state_dict({"state": cut, "param_groups": state["param_groups"]})


def make_whole(split: SplitModel, optimizers: list[Optimizer]) -> None:
    """Undo the split of the module and convert its optimizers' states accordingly; collective."""
    for optimizer in optimizers:
        for index, shard in enumerate(_shards(split, optimizer)):
            entries = optimizer.state.get(_parameters(optimizer)[index], {})
            for key, value in entries.items():
                entries[key] = _whole(split, key, value, shard)
    split.restore()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shards(split: SplitModel, optimizer: Optimizer) -> Iterator[Shard]:
    parts = {part.parameter: part.shard for part in split.parts.values()}
    for parameter in _parameters(optimizer):
        yield parts.get(parameter) or Shard(tuple(parameter.shape))


def _whole(split: SplitModel, key: str, value: Any, shard: Shard) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or not shard.cuts:
        return value
    if tuple(value.shape) != shard.local_shape:
        raise PlanError(
            f"optimizer: its state '{key}' has shape {tuple(value.shape)} for a part of shape {shard.local_shape} of a "
            "split parameter; only states of the parameter's shape can be put together"
        )
    return split.whole(value, shard)


def _cut(name: str, value: Any, shard: Shard | None) -> Any:
    cut = isinstance(value, Tensor) and shard is not None and shard.cuts and tuple(value.shape) == shard.shape
    return shard.take(value) if cut and shard is not None else value


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
