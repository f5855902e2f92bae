"""Converts states of split models and their optimizers to those of the unsplit model, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autosync.errors import PlanError
from lightning_autosync.hybrid.execution.shards import ParameterShard
from lightning_autosync.hybrid.execution.split_model import Part, SplitModel


def model_state(split: SplitModel, keep: bool) -> dict[str, Any]:
    """The ``state_dict()`` of the unsplit module, on the CPU; collective.

    Args:
        keep: whether to return it on this rank; other ranks return an empty one.

    Raises:
        PlanError: the module's own ``state_dict()`` has a tensor of another shape in place of a split parameter.
    """
    cuts = SavedCuts(split)
    found = {}
    for name, value in split.module.state_dict().items():
        part = cuts.part_of(name, value)
        whole = value if part is None else split.whole(value.detach().to(part.parameter.device), part.shard)
        if keep:
            found[name] = _on_cpu(whole)
    return found


class SavedCuts:
    """Finds the parts of split parameters among the tensors of a ``state_dict()``, which may be copies."""

    def __init__(self, split: SplitModel) -> None:
        by_parameter = {part.parameter: part for part in split.parts.values() if part.shard.cuts}
        named = split.module.named_parameters(remove_duplicate=False)
        self._by_name = {name: by_parameter[parameter] for name, parameter in named if parameter in by_parameter}
        # A module's own hooks may rename tensors.
        self._by_storage = {parameter.data_ptr(): part for parameter, part in by_parameter.items()}

    def part_of(self, name: str, value: Any) -> Part | None:
        """The part that an entry of the state holds; None if the entry is not a part.

        Raises:
            PlanError: the entry is named as a split parameter, and its shape is neither the part's nor the whole's.
        """
        if not isinstance(value, Tensor):
            return None
        part = self._by_name.get(name) or self._by_storage.get(value.data_ptr())
        if part is None or tuple(value.shape) == part.shard.shape:
            return None
        if tuple(value.shape) != part.shard.local_shape:
            raise PlanError(
                f"state_dict: '{name}' has shape {tuple(value.shape)}; allowed for this split parameter: "
                f"{part.shard.local_shape} (this rank's part) or {part.shard.shape} (the whole)"
            )
        return part


def load_model_state(split: SplitModel, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a ``state_dict()`` of the unsplit module; each rank takes its parts."""
    parts = shards_of(split)
    shards = {name: parts[parameter] for name, parameter in split.module.named_parameters(remove_duplicate=False)}
    split.module.load_state_dict(
        {name: _cut(name, value, shards.get(name)) for name, value in state.items()}, strict=strict
    )


def optimizer_state(split: SplitModel, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer of the unsplit module, on the CPU; collective.

    Args:
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


def _shards(split: SplitModel, optimizer: Optimizer) -> Iterator[ParameterShard]:
    parts = shards_of(split)
    for parameter in _parameters(optimizer):
        yield parts.get(parameter) or ParameterShard(tuple(parameter.shape))


def shards_of(split: SplitModel | None) -> dict[Tensor, ParameterShard]:
    """The position of this rank's part of each parameter; empty without a split model."""
    return {} if split is None else {part.parameter: part.shard for part in split.parts.values()}


def is_part(key: str, value: Any, shard: ParameterShard) -> bool:
    """Whether an entry of an optimizer's state is cut, as its parameter is.

    Raises:
        PlanError: it is a tensor of another shape than the parameter's part, so it is unknown how to merge it.
    """
    if not isinstance(value, Tensor) or not value.dim() or not shard.cuts:
        return False
    if tuple(value.shape) != shard.local_shape:
        raise PlanError(
            f"optimizer: its state '{key}' has shape {tuple(value.shape)}, but the split parameter's part has "
            f"{shard.local_shape}; a checkpoint can merge only states with the parameter's shape"
        )
    return True


def _whole(split: SplitModel, key: str, value: Any, shard: ParameterShard) -> Any:
    return split.whole(value, shard) if is_part(key, value, shard) else value


def _cut(name: str, value: Any, shard: ParameterShard | None) -> Any:
    cut = isinstance(value, Tensor) and shard is not None and shard.cuts and tuple(value.shape) == shard.shape
    return shard.take(value) if cut and shard is not None else value


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
