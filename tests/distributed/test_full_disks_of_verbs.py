"""Every verb for real on a disk that is too small: one line names the file, and the exit status is not 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from disks import small_disk
from tuning_runs import write_run

from lightning_autosync.measure.emulation import netns
from lightning_autosync.measure.workers import LaunchError

try:
    netns.require_namespaces()
    UNABLE = ""
except LaunchError as error:
    UNABLE = str(error)

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(bool(UNABLE), reason=UNABLE)]

RUN = "import sys; from lightning_autosync.cli import main; sys.argv[0] = 'autosync'; main()"
FLAT = ("model=flat", "model.mib=0.01", "ddp=short", "rounds=1", "steps=1")
LINES: dict[str, tuple[str, ...]] = {
    "bench": FLAT,
    "collect": ("dataset=DISK/data", "pairs=2", "seconds=0.05", "variants=1", "families=[vgg16]", "quiet=1000"),
    "predict": ("cluster=four_equal", "plan=ps"),
    "probe": ("ranks=2", "head=0.05", "window=0.1"),
    "report": ("run=RUN", "file=DISK/report.html"),
    "train": (
        "ranks=2", "trainer.max_epochs=1", "+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1",
        "trainer.accelerator=cpu", "trainer.enable_checkpointing=true",
    ),
    "tune": (
        *FLAT,
        "search=random",
        "search.budget=8",
        "trial.warm_up=1",
        "trial.min_steps=2",
        "trial.max_steps=2",
        "finalists=1",
    ),
    "validate": ("cases=1", "clusters=[four_equal]", "families=[ncf]", "seconds=0.1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tuned") / "run"
    write_run(folder, budget=12)
    return folder


@pytest.mark.parametrize("verb", LINES)
def test_one_line_names_the_file(verb, tuned, tmp_path):
    with small_disk(tmp_path / "disk", 24) as disk:
        (disk / "filler").write_bytes(bytes(4096))
        line = [word.replace("DISK", str(disk)).replace("RUN", str(tuned)) for word in LINES[verb]]
        command = [sys.executable, "-c", RUN, verb, *line, f"hydra.run.dir={disk}/run"]
        finished = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
        )
    last = finished.stderr.splitlines()[-1:]
    assert finished.returncode == 1, (finished.stdout[-500:], finished.stderr[-500:])
    assert "Traceback" not in finished.stderr
    assert str(disk) in last[0] or "run directory" in last[0]
    assert "No space left on device" in last[0]
