"""A reader of sharded checkpoints that runs nothing of what they hold.

``torch.distributed.checkpoint`` keeps its table of contents as a pickle, which may name any function to call. This
reader takes only the types that the table consists of, and only tensors, which torch reads without unpickling code.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_autosync.errors import DocumentError

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
    """Reads the folder that `lightning_autosync.hybrid.execution.sharded_checkpoint.save_sharded` wrote."""

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
