"""Runs the Python blocks of a page, each by itself: ``python page_snippets.py PAGE``, in an empty directory.

What a block needs and does not make is put there or given before: plans, clusters, a checkpoint's folder, a `module`.
A Trainer trains for two batches on one rank, whatever its numbers of nodes, devices and epochs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_autosync import ClusterSpec, Workload, builders
from lightning_autosync.workload import Variable

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 1,
    "max_epochs": 1,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class ShortTrainer(L.Trainer):
    """A Trainer of one rank and two batches."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments | SHORT)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The blocks of a language with the lines at which they begin."""
    text = page.read_text()
    found = (match for match in FENCE.finditer(text) if match[1] == language)
    return [(text.count("\n", 0, match.start(2)) + 1, match[2]) for match in found]


def write_files(root: Path) -> None:
    """Write the files that blocks read: those of a tuning run and of a hybrid one."""
    workload = Workload(name="layers", variables=(Variable(name="weight", shape=(8, 8)),))
    cluster = ClusterSpec.uniform(4, bandwidth="100 Mbit/s")
    for folder in (Path(), Path("tuned")):
        folder.mkdir(exist_ok=True)
        builders.all_reduce(workload, cluster).save(folder / "plan.yaml")
        cluster.save(folder / "cluster.yaml")
    (hybrid,) = (text for _, text in blocks(root / "docs/hybrid.md", "yaml"))
    Path("split").mkdir()
    Path("split/plan.yaml").write_text(hybrid)


def write_checkpoint() -> None:
    """Write a checkpoint folder as `AutoDDLStrategy` does."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"state_dict.weight": torch.ones(2)}, checkpoint_id="folder/tensors-1", no_dist=True)
    torch.save({"autosync_tensors": "tensors-1"}, "folder/rest.pt")


def main(page: Path) -> None:
    """Run the blocks of a page; an error's traceback names the page and the line."""
    torch.set_num_threads(1)
    L.Trainer = ShortTrainer  # type: ignore[misc]
    write_files(Path(__file__).parents[2])
    for line, text in blocks(page, "python"):
        if "folder/rest.pt" in text:
            write_checkpoint()
        code = compile("\n" * (line - 1) + text, str(page), "exec")
        exec(code, {"__name__": "__main__", "module": BoringModel()})
        print(f"{page.name}:{line} ran")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
