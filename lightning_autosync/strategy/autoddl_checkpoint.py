"""Checkpoints of split models: a file with the unsplit model, or a folder to which each rank writes its parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autosync.hybrid.execution import checkpoint as states
from lightning_autosync.hybrid.execution.sharded_checkpoint import load_sharded, save_sharded
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.strategy.base import Replica
from lightning_autosync.strategy.split import SplitReplica

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object

TENSORS, REST = "tensors", "rest.pt"
"""Names in a folder: the tensors (``torch.distributed.checkpoint``), and a file with all other state."""


class SplitCheckpoints(_Base):
    """The part of `AutoDDLMixin` that saves and restores checkpoints.

    The state of the model is restored before the model is split, and that of the optimizers afterwards.
    """

    _replica: Replica | None
    _resumed_from: Path | None
    """The folder from which training resumes; None after the optimizers are restored."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return {}
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
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if self.is_global_zero:
            path.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(checkpoint, path / REST, storage_options=storage_options)
        # The other ranks may write only when rank 0 has made the folder.
        self.barrier()
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        save_sharded(path / TENSORS, self._plain, optimizers, self._split)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._resumed_from = path if path.is_dir() else None
        file = path / REST if path.is_dir() else path
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._resumed_from is not None:
            load_sharded(self._resumed_from / TENSORS, self._plain, [], self._split)
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
            load_sharded(self._resumed_from / TENSORS, self._plain, self.optimizers, self._split)
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
