"""A target that cannot be written is told of in one line, with its name; the best plan is kept elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import yaml
from disks import read_only, small_disk
from priced_session import PricedSession
from sweeps import sweep
from test_tuning_interruptions import with_session
from tuning_world import World, configuration

from lightning_autosync.cli.tune import tune
from lightning_autosync.documents import append_lines, held, write_data, write_text
from lightning_autosync.errors import DocumentError, UnwritableError
from lightning_autosync.plan import SyncPlan

WRITERS = {
    "text": lambda path: write_text(path, "x" * 10_000),
    "data": lambda path: write_data(path, {"a": "x" * 10_000}),
    "lines": lambda path: append_lines(path, "x" * 10_000 + "\n"),
}
VERB = """
def tune(configuration, directory):
    {}
"""
RUN = """
import sys
import verb
from lightning_autosync.cli.application import main
sys.modules["lightning_autosync.cli.tune"] = verb
main()
"""


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_the_message_names_the_file_and_the_reason(write, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UnwritableError, match=rf"^{tmp_path}/file/x: cannot be written: (File exists|Not a directory)$"
    ):
        write(tmp_path / "file" / "x")
    with small_disk(tmp_path / "full", 4) as full:
        path = full / "x"
        with pytest.raises(DocumentError, match=rf"^{path}: cannot be written: No space left on device$"):
            write(path)
        assert [one for one in full.iterdir() if one.name.startswith(".")] == []
    with (
        read_only(tmp_path / "kept") as kept,
        pytest.raises(OSError, match=rf"^{kept}/x: cannot be written: Read-only file system$"),
    ):
        write(kept / "x")


def test_so_does_that_of_a_lock(tmp_path):
    (tmp_path / "file").touch()
    refusal = pytest.raises(UnwritableError, match=rf"^{tmp_path}/file/lock: cannot be written")
    with refusal, held(tmp_path / "file" / "lock", ValueError()):
        pass


def run(folder: Path, body: str, *line: str, stdout: str | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "verb.py").write_text(VERB.format(body))
    command = [sys.executable, "-c", RUN, "tune", *line]
    surroundings = {**os.environ, "PYTHONPATH": str(folder)}
    with open(stdout or os.devnull, "w") as out:
        return forked.run(command, cwd=folder, env=surroundings, stdout=out, stderr=subprocess.PIPE)


def test_a_run_directory_that_cannot_be_written(tmp_path):
    with small_disk(tmp_path / "full", 4) as full:
        finished = run(tmp_path, "pass", f"hydra.run.dir={full}/run")
        assert finished.returncode == 1
        assert re.fullmatch(r"autosync tune: .*: No space left on device\n", finished.stderr)
    (tmp_path / "file").touch()
    finished = run(tmp_path, "pass", "hydra.run.dir=file")
    assert (finished.returncode, finished.stderr) == (1, "autosync tune: file: File exists\n")


def test_a_file_that_a_verb_opens_itself(tmp_path):
    finished = run(tmp_path, "open(directory / 'none' / 'x', 'w')", "hydra.run.dir=run")
    assert finished.returncode == 1
    assert finished.stderr == f"autosync tune: {tmp_path}/run/none/x: No such file or directory\n"


def test_an_output_that_takes_nothing(tmp_path):
    finished = run(tmp_path, "print('x')", "hydra.run.dir=run", stdout="/dev/full")
    assert re.fullmatch(r"autosync tune: standard output\b.*: No space left on device\n", finished.stderr)
    assert finished.returncode == 1


@pytest.mark.slow
def test_a_sweep_whose_disk_is_full(tmp_path):
    with small_disk(tmp_path / "full", 64) as full:
        body = "(directory / 'x').write_text('x' * 40_000)"
        finished = run(tmp_path, body, "-m", "search.seed=0,1,2", f"hydra.sweep.dir={full}/sweep")
        assert finished.returncode == 1
        assert "Traceback" not in finished.stderr
        assert "No space left on device" in finished.stderr.splitlines()[-1]


@pytest.mark.parametrize("temporary", sweep([True, False], [True]))
def test_the_best_plan_is_printed_and_kept_where_it_can_be(temporary, tmp_path, monkeypatch, capsys):
    world, run = World(tmp_path / "world"), tmp_path / "run"
    with_session(monkeypatch, world, PricedSession(world.price))
    (run / "plan.yaml").mkdir(parents=True)  # a folder in place of the file
    (tmp_path / "other").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("other" if temporary else "none")))
    with pytest.raises(
        UnwritableError, match=rf"^{run}/plan.yaml: cannot be written: .*; the best plan is printed"
    ) as told:
        tune(configuration(), run)
    printed = capsys.readouterr().out
    plan = SyncPlan.from_dict(yaml.safe_load(printed[printed.index("format: autosync-plan") :]))
    if temporary:
        (place,) = re.findall(r"saved as (\S+)$", str(told.value))
        assert SyncPlan.load(place) == plan
        assert (Path(place).parent / "result.json").exists()
    else:
        assert "could not be saved" in str(told.value)
