"""Sharded checkpoints, of which each rank writes its parts with ``torch.distributed.checkpoint``.

Tensors have the names, shapes and offsets of the unsplit model, so that any mesh and torch's own tools can read them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.execution.checkpoint import SavedCuts, is_part, load_model_state, shards_of
from lightning_autosync.hybrid.execution.shards import ElementBox, ParameterShard
from lightning_autosync.hybrid.execution.split_model import SplitModel


class ShardedTensorView(Tensor):
    """Describes a rank's part of a tensor to ``torch.distributed.checkpoint``.

    Args:
        part: [local shape] the rank's part.
    """

    _part: Tensor
    _chunks: list[ElementBox]

    @staticmethod
    def __new__(cls, part: Tensor, shard: ParameterShard) -> ShardedTensorView:
        made: ShardedTensorView = Tensor._make_wrapper_subclass(cls, shard.shape, dtype=part.dtype, device=part.device)
        made._part, made._chunks = part, list(shard.chunks())
        return made

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._part)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_stored(chunk), properties=properties, size=self.size()),
            )
            for chunk in self._chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_stored(chunk) for chunk in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        found = next(chunk for chunk in self._chunks if torch.Size(chunk.offsets) == index.offset)
        tensor = self._part
        for axis, (start, length) in enumerate(zip(found.local, found.sizes, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        return tensor.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: this tensor has no data; it only describes a rank's part of a checkpoint")


def _stored(chunk: ElementBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


class _BuffersFromFirst(DefaultSavePlanner):
    """Torch's planner, but buffers that several ranks have come from the first of these.

    Torch spreads tensors that all ranks have over them, and statistics of one layer that differ between ranks would
    come from several.

    Args:
        buffers: names of the buffers in the checkpoint.
    """

    def __init__(self, buffers: Collection[str]) -> None:
        super().__init__()
        self._buffers = buffers

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        written: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            plans.append(replace(plan, items=[item for item in plan.items if item.index not in written]))
            written |= {item.index for item in plan.items if item.index.fqn in self._buffers}
        return super().create_global_plan(plans)


def save_sharded(
    folder: str | os.PathLike[str], module: nn.Module, optimizers: Sequence[Optimizer], split: SplitModel | None
) -> None:
    """Write all tensors of a model and its optimizers, but those in `other_state`; collective.

    Buffers that several ranks have come from the first of these. Ranks share the work of writing other tensors.

    Args:
        folder: a folder that all ranks can access.
        split: the split model of the module; None if the module is whole on every rank.

    Raises:
        PlanError: the state of the module or an optimizer has a tensor of another shape than its split parameter's.
    """
    state = module.state_dict(keep_vars=True)
    tensors, shards = _model_tensors(state, split), shards_of(split)
    for number, optimizer in enumerate(optimizers):
        tensors |= _optimizer_tensors(number, module, optimizer, shards)
    buffers = {f"state_dict.{name}" for name, value in state.items() if not isinstance(value, nn.Parameter)}
    dcp.save(tensors, checkpoint_id=folder, planner=_BuffersFromFirst(buffers))


def other_state(module: nn.Module) -> dict[str, Any]:
    """The entries of a module's ``state_dict()`` that `save_sharded` leaves out: extra state, and what is no tensor."""
    return {name: value for name, value in module.state_dict().items() if not _is_saved(name, value)}


def load_model(
    folder: str | os.PathLike[str], module: nn.Module, split: SplitModel | None, others: Mapping[str, Any], strict: bool
) -> None:
    """Load the model that `save_sharded` wrote, on any mesh; collective.

    Args:
        folder: as in `save_sharded`, like ``module`` and ``split``.
        others: the module's `other_state`, which is loaded as well.
        strict: as of ``load_state_dict``.

    Raises:
        DocumentError: the folder's table of contents is damaged, or holds something else than tensors.
    """
    state = module.state_dict()
    dcp.load(_model_tensors(state, split), storage_reader=CheckedReader(folder))
    # The tensors of the state may be copies, and a module may load them in its own way.
    saved = {name: value for name, value in state.items() if _is_saved(name, value)} | dict(others)
    if split is None:
        module.load_state_dict(saved, strict=strict)
    else:
        load_model_state(split, saved, strict)


def load_optimizers(
    folder: str | os.PathLike[str], module: nn.Module, optimizers: Sequence[Optimizer], split: SplitModel | None
) -> None:
    """Load the tensors of optimizers that `save_sharded` wrote, on any mesh; collective.

    States that do not exist yet are created.

    Raises:
        DocumentError: the folder's table of contents is damaged, or holds something else than tensors.
        PlanError: as of `save_sharded`.
    """
    reader, shards = CheckedReader(folder), shards_of(split)
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        _make_states(number, module, optimizer, shards, stored)
        tensors |= _optimizer_tensors(number, module, optimizer, shards)
    dcp.load(tensors, storage_reader=reader)


def _is_saved(name: str, value: Any) -> bool:
    # Extra state may have another shape in each checkpoint.
    return isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state"


def _model_tensors(state: Mapping[str, Any], split: SplitModel | None) -> dict[str, Any]:
    cuts = None if split is None else SavedCuts(split)
    found: dict[str, Any] = {}
    for name, value in state.items():
        if _is_saved(name, value):
            part = None if cuts is None else cuts.part_of(name, value)
            own = value.detach()
            found[f"state_dict.{name}"] = own if part is None else ShardedTensorView(own, part.shard)
    return found


def _optimizer_tensors(
    number: int, module: nn.Module, optimizer: Optimizer, shards: Mapping[Tensor, ParameterShard]
) -> dict[str, Any]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    found: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        shard = shards.get(parameter)
        for key, value in entries.items():
            if isinstance(value, Tensor):
                own = ShardedTensorView(value, shard) if shard is not None and is_part(key, value, shard) else value
                found[f"optimizer_{number}.state.{names[parameter]}.{key}"] = own
    return found


def _make_states(
    number: int,
    module: nn.Module,
    optimizer: Optimizer,
    shards: Mapping[Tensor, ParameterShard],
    stored: Mapping[str, Any],
) -> None:
    """Create zero tensors for all stored states that an optimizer lacks, because loading works in place."""
    owned = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        prefix = f"optimizer_{number}.state.{name}."
        if parameter not in owned:
            continue
        for key in [found[len(prefix) :] for found in stored if found.startswith(prefix)]:
            about = stored[prefix + key]
            if not isinstance(about, TensorStorageMetadata) or key in optimizer.state[parameter]:
                continue
            shard = shards.get(parameter)
            whole = tuple(about.size)
            shape = shard.local_shape if shard is not None and whole == shard.shape else whole
            # As `Optimizer.load_state_dict`: other optimizers than these two kinds read step counts on the CPU.
            group = owned[parameter]
            stays = key != "step" or group.get("fused") or group.get("capturable")
            device = parameter.device if stays else torch.device("cpu")
            optimizer.state[parameter][key] = torch.zeros(shape, dtype=about.properties.dtype, device=device)


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class CheckedReader(dcp.FileSystemReader):
    """Reads the folder that `save_sharded` wrote, and runs nothing of what it holds.

    ``torch.distributed.checkpoint`` keeps its table of contents as a pickle, which may name any function to call. This
    reader takes only the types that the table consists of, and only tensors, which torch reads without unpickling code.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents.

        Raises:
            DocumentError: it cannot be read, or it has something else than tensors in files of this folder.
        """
        path = Path(os.fspath(self.path)) / ".metadata"
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
        except DocumentError as error:
            raise DocumentError(f"{path}: {error}") from None
        except Exception as error:  # a damaged pickle raises whatever it likes
            raise DocumentError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None
        fault = _fault(found)
        if fault:
            raise DocumentError(f"{path}: {fault}")
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DocumentError(f"it names {module}.{name}; allowed: only classes that describe tensors")
        return super().find_class(module, name)


def _fault(found: Any) -> str:
    """What is wrong with a table of contents; nothing if it is empty."""
    if not isinstance(found, Metadata):
        return f"it contains a {type(found).__name__}; expected a checkpoint's metadata"
    for name, about in found.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            return f"'{name}' is not a tensor"
    for index, info in (found.storage_data or {}).items():
        if Path(info.relative_path).name != info.relative_path:
            return f"'{index.fqn}' is stored in {info.relative_path}; allowed: a file in the same folder"
        if info.transform_descriptors:
            return (
                f"'{index.fqn}' is transformed by {', '.join(map(str, info.transform_descriptors))}, which is not "
                "allowed"
            )
    return ""
