"""A sharded checkpoint is data: nothing that it names is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.execution.sharded_checkpoint import CheckedReader

TENSORS = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "narrow": torch.ones(2, dtype=torch.bfloat16),
    "step": torch.tensor(3),
    "image": torch.ones(2, 2, 2, 2).to(memory_format=torch.channels_last),
}


class Harm:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "tensors", no_dist=True)
    return tmp_path / "tensors"


def changed(folder: Path, change: Callable[[Any], object]) -> None:
    """Write another table of contents."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(found) or found))


def test_what_was_saved_is_read(folder: Path) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, storage_reader=CheckedReader(folder), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_nothing_is_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "harmed"
    changed(folder, lambda found: Harm(mark))
    with pytest.raises(
        DocumentError, match=r"\.metadata: it names posix\.system; allowed: only classes that describe tensors"
    ):
        CheckedReader(folder).read_metadata()
    assert not mark.exists()


def test_damage_is_one_error(folder: Path) -> None:
    path = folder / ".metadata"
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(DocumentError, match=r"\.metadata: "):
            CheckedReader(folder).read_metadata()


def _elsewhere(found: Any) -> None:
    info = next(iter(found.storage_data.values()))
    info.relative_path = "../other"


def _no_tensor(found: Any) -> None:
    found.state_dict_metadata["weight"] = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_elsewhere, "is stored in ../other; allowed: a file in the same folder"),
        (_no_tensor, "'weight' is not a tensor"),
        (lambda found: {"a": 1}, "it contains a dict; expected a checkpoint's metadata"),
    ],
)
def test_other_contents_are_refused(folder: Path, change: Callable[[Any], object], message: str) -> None:
    changed(folder, change)
    with pytest.raises(DocumentError, match=message):
        CheckedReader(folder).read_metadata()
