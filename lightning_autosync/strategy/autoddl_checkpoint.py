"""Checkpoints of split models: a file with the unsplit model, or a folder to which each rank writes its parts."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autosync.documents import shown
from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.execution import checkpoint as states
from lightning_autosync.hybrid.execution.sharded_checkpoint import (
    load_model,
    load_optimizers,
    other_state,
    save_sharded,
)
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.split import SplitReplica

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object

REST = "rest.pt"
"""The file in a checkpoint's folder with all state but tensors."""
TENSORS = "autosync_tensors"
"""Key in that file: the name of the folder beside it with the tensors (``torch.distributed.checkpoint``)."""
_PREFIX = "tensors-"
"""How names of folders with tensors begin; each save adds its own hexadecimal number."""


class SplitCheckpoints(_Base):
    """The part of `AutoDDLMixin` that saves and restores checkpoints.

    The state of the model is restored before the model is split, and that of the optimizers afterwards.
    """

    _replica: Replica | None
    _resumed_from: Path | None
    """The folder with the tensors from which training resumes; None after the optimizers are restored."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return other_state(self._plain)
        if self._split is not None:
            return states.model_state(self._split, self.is_global_zero)
        found: dict[str, Any] = self._plain.state_dict()
        return found

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._save_distributed_checkpoint:
            saved = optimizer.state_dict()
            rest = {
                index: {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)}
                for index, entries in saved["state"].items()
            }
            return {"state": rest, "param_groups": saved["param_groups"]}
        if self._split is not None:
            return states.optimizer_state(self._split, optimizer, self.is_global_zero)
        found: dict[str, Any] = optimizer.state_dict()
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        given, name = self.broadcast((filepath, f"{_PREFIX}{secrets.token_hex(8)}"))
        path = Path(given)
        if self._save_distributed_checkpoint:
            optimizers = self.optimizers if "optimizer_states" in checkpoint else []
            save_sharded(path / name, self._plain, optimizers, self._split)
            if self.is_global_zero:
                self._finish(path, name, checkpoint, storage_options)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _finish(self, path: Path, name: str, checkpoint: dict[str, Any], storage_options: Any) -> None:
        """Let a checkpoint's folder hold the new state: up to the renaming of a file it holds the old one."""
        aside = path / f"{REST}.part"
        self.checkpoint_io.save_checkpoint({**checkpoint, TENSORS: name}, aside, storage_options=storage_options)
        self.checkpoint_io.teardown()  # waits for plugins that write in the background, and allows further saves
        os.replace(aside, path / REST)
        for old in path.glob(f"{_PREFIX}*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        file = path / REST if path.is_dir() else path
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
        self._resumed_from = path / _folder_of_tensors(found, file) if path.is_dir() else None
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._resumed_from is not None:
            load_model(self._resumed_from, self._plain, self._split, checkpoint["state_dict"], strict)
        elif self._split is not None:
            states.load_model_state(self._split, checkpoint["state_dict"], strict)
        else:
            self._plain.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if self._split is not None and self._resumed_from is None:
                states.load_optimizer_state(self._split, optimizer, saved)
            else:
                optimizer.load_state_dict(saved)
        if self._resumed_from is not None:
            load_optimizers(self._resumed_from, self._plain, self.optimizers, self._split)
            self._resumed_from = None

    @property
    def _split(self) -> SplitModel | None:
        replica = self._replica
        return replica.split if isinstance(replica, SplitReplica) and replica.split.is_split else None

    @property
    def _plain(self) -> nn.Module:
        """The user's module, without a wrapper."""
        assert self.lightning_module is not None
        module: nn.Module = self.lightning_module
        return module


def _folder_of_tensors(checkpoint: Mapping[str, Any], file: Path) -> str:
    name = checkpoint.get(TENSORS)
    if not isinstance(name, str) or not re.fullmatch(f"{_PREFIX}[0-9a-f]+", name):
        raise DocumentError(
            f"{file}: {TENSORS}: {shown(name)}; expected the name of a folder beside it, '{_PREFIX}...'. Folders that "
            "earlier versions wrote cannot be read"
        )
    return name
