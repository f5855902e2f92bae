"""Sharded checkpoints hold one state as a whole, whenever saving ends."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.optim import SGD

from lightning_autosync.errors import DocumentError
from lightning_autosync.strategy.autoddl_checkpoint import SplitCheckpoints


class Alone(SplitCheckpoints):
    """A job of one rank, whose weights, momenta and state outside of tensors are one number."""

    is_global_zero = _save_distributed_checkpoint = True
    _replica = _resumed_from = None

    def __init__(self, value: float, io: Any = None, module: nn.Module | None = None) -> None:
        self.lightning_module = module or nn.Linear(3, 2)
        self.optimizers = [SGD(self.lightning_module.parameters(), lr=0.1, momentum=0.9)]
        self.checkpoint_io = io or TorchCheckpointIO()
        self.value = value
        for parameter in self.lightning_module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        self.optimizers[0].step()
        for parameter in self.lightning_module.parameters():
            nn.init.constant_(parameter, value)

    def broadcast(self, given: Any) -> Any:
        return given

    def barrier(self) -> None:
        pass

    def save(self, path: Path) -> None:
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        state = self.lightning_module_state_dict()
        self.save_checkpoint({"state_dict": state, "optimizer_states": states, "value": self.value}, path)


def loaded(path: Path) -> set[float]:
    """All numbers that a checkpoint holds."""
    job = Alone(0.0)
    found = job.load_checkpoint(path, weights_only=True)
    job.load_model_state_dict(found)
    job.load_optimizer_state_dict(found)
    momenta = [entries["momentum_buffer"] for entries in job.optimizers[0].state.values()]
    tensors = [*job.lightning_module.parameters(), *momenta]
    return {found["value"], *(number for tensor in tensors for number in tensor.flatten().tolist())}


def _tensors_only() -> Any:
    def save(*given: Any, **options: Any) -> None:
        real(*given, **options)
        raise KeyboardInterrupt

    real = dcp.save
    return mock.patch.object(dcp, "save", save)


def _all_but_the_last_change() -> Any:
    return mock.patch.object(os, "replace", side_effect=KeyboardInterrupt)


@pytest.mark.parametrize("written", [_tensors_only, _all_but_the_last_change])
def test_the_state_before_stays_until_the_new_one_is_written(tmp_path: Path, written: Any) -> None:
    path = tmp_path / "last.ckpt"
    Alone(1.0).save(path)
    with written(), pytest.raises(KeyboardInterrupt):
        Alone(2.0).save(path)
    assert loaded(path) == {1.0}
    Alone(3.0).save(path)
    assert loaded(path) == {3.0}
    assert len(list(path.iterdir())) == 2, "nothing of earlier saves is left"


def test_a_plugin_that_writes_in_the_background(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(TorchCheckpointIO())
    for value in (1.0, 2.0):
        Alone(value, io).save(tmp_path / "last.ckpt")
        assert loaded(tmp_path / "last.ckpt") == {value}


@pytest.mark.parametrize("name", [None, "tensors", "../tensors-0"])
def test_a_folder_without_the_name_of_its_tensors_is_refused(tmp_path: Path, name: str | None) -> None:
    torch.save({"state_dict": {}} | ({} if name is None else {"autosync_tensors": name}), tmp_path / "rest.pt")
    with pytest.raises(DocumentError, match=r"rest\.pt: autosync_tensors: .* earlier versions wrote cannot be read"):
        Alone(0.0).load_checkpoint(tmp_path, weights_only=True)


class Telling(nn.Linear):
    """Has state besides its tensors: ``text``, and ``seen``, whose size changes."""

    text, seen = "", torch.zeros(0)

    def get_extra_state(self) -> Any:
        return {"text": self.text} if self.text else self.seen

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, Tensor):
            self.seen = state
        else:
            self.text = state["text"]


@pytest.mark.parametrize("text", ["", "told"])
def test_state_that_is_no_tensor_of_the_model_is_kept(tmp_path: Path, text: str) -> None:
    before, after = Telling(3, 2), Telling(3, 2)
    before.text, after.text, before.seen = text, text and "other", torch.arange(3)
    Alone(1.0, module=before).save(tmp_path / "last.ckpt")
    job = Alone(0.0, module=after)
    job.load_model_state_dict(job.load_checkpoint(tmp_path / "last.ckpt", weights_only=True))
    assert after.text == text
    assert text or torch.equal(after.seen, before.seen)


def test_a_module_that_saves_copies_is_loaded(tmp_path: Path) -> None:
    def doubled(_: nn.Module, state: dict[str, Any], *about: Any) -> None:
        state.update({name: 2 * value.detach() for name, value in state.items()})

    jobs = [Alone(value, module=nn.Linear(3, 2)) for value in (1.0, 0.0)]
    for job in jobs:
        job.lightning_module._register_state_dict_hook(doubled)
    jobs[0].save(tmp_path / "last.ckpt")
    jobs[1].load_model_state_dict(jobs[1].load_checkpoint(tmp_path / "last.ckpt", weights_only=True))
    assert all(bool((parameter == 2.0).all()) for parameter in jobs[1].lightning_module.parameters())


@pytest.mark.parametrize("strict", [False, True])
def test_entries_that_the_module_lacks(tmp_path: Path, strict: bool) -> None:
    Alone(1.0, module=Telling(3, 2)).save(tmp_path / "last.ckpt")
    job = Alone(0.0)
    found = job.load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    with pytest.raises(RuntimeError, match="Unexpected key") if strict else nullcontext():
        job.load_model_state_dict(found, strict=strict)
