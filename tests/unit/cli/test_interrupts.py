"""A Ctrl-C or SIGTERM while nothing else is under way."""

from __future__ import annotations

import os
import signal
import sys

import forked
import pytest

from lightning_autosync import interrupts

_ENDS_AT_ONCE = """
import os, signal
from lightning_autosync import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background leaves it ignored
interrupts.end_at_once()
os.close(2)
signal.raise_signal(signal.SIGINT)
"""


def test_a_command_whose_messages_nobody_reads_ends_with_the_same_status() -> None:
    assert forked.run([sys.executable, "-c", _ENDS_AT_ONCE]).returncode == interrupts.STATUS


_TURNED_INTO_ANOTHER = """
import signal, sys
from unittest import mock
from lightning_autosync.cli import bench, main

def work(configuration, directory):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise KeyError("what a library makes of it") from None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["autosync", "bench", "hydra.run.dir=run"]
with mock.patch.object(bench, "bench", work):
    main()
"""


def test_a_ctrl_c_that_a_library_turns_into_another_error_ends_with_the_same_status(tmp_path) -> None:
    done = forked.run([sys.executable, "-c", _TURNED_INTO_ANOTHER], cwd=tmp_path, capture_output=True)
    assert done.returncode == interrupts.STATUS
    assert done.stderr.endswith("autosync bench: interrupted\n")
    assert "Traceback" not in done.stderr


_TERMINATED = """
import os, signal, sys, tempfile
from pathlib import Path
from unittest import mock
from lightning_autosync.cli import bench, configuration, main

tempfile.tempdir = os.path.abspath("temporary")

def end(*arguments):
    assert module is bench and sys.argv[-1] != "-m" or list(Path("temporary").glob("autosync-*"))
    signal.raise_signal(getattr(signal, os.environ["ENDING"]))

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a parent under nohup leaves it ignored
module, name = {"composes": (configuration, "check_overrides"), "works": (bench, "bench")}[os.environ["WHILE"]]
sys.argv = ["autosync", "bench", *os.environ["WORDS"].split()]
with mock.patch.object(module, name, end):
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("moment", "words"),
    [("composes", "hydra.run.dir=run"), ("works", "hydra.run.dir=run"), ("works", "hydra.sweep.dir=run rounds=3,4 -m")],
)
def test_a_command_that_is_terminated_leaves_no_temporary_folder(number, moment, words, tmp_path) -> None:
    tmp_path.joinpath("temporary").mkdir()
    given = {"ENDING": number.name, "WHILE": moment, "WORDS": words}
    command = [sys.executable, "-c", _TERMINATED]
    done = forked.run(command, cwd=tmp_path, env={**os.environ, **given}, capture_output=True)
    assert done.returncode == -number, done.stderr
    assert list(tmp_path.joinpath("temporary").glob("autosync-*")) == []


_FORKED = """
import os, signal
from lightning_autosync import interrupts

with interrupts.temporary_folder() as folder:
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
assert not folder.exists()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def test_a_forked_copy_that_is_terminated_leaves_the_folder_to_its_parent() -> None:
    assert forked.run([sys.executable, "-c", _FORKED]).returncode == 0


_UNDER_ANOTHER_HANDLER = """
import signal
from lightning_autosync import interrupts

with interrupts.temporary_folder() as folder:
    before, called = signal.getsignal(signal.SIGTERM), []
    signal.signal(signal.SIGTERM, lambda *given: called.append(before(*given)))  # as Lightning's handler
    signal.raise_signal(signal.SIGTERM)
    assert called == [None]
    assert folder.is_dir()
"""


def test_a_handler_that_calls_the_one_before_it_ends_the_process_itself() -> None:
    assert forked.run([sys.executable, "-c", _UNDER_ANOTHER_HANDLER]).returncode == 0


_REPLACED = """
import signal
from lightning_autosync import interrupts

def own(*_):
    pass

with interrupts.temporary_folder():
    signal.signal(signal.SIGTERM, own)
assert signal.getsignal(signal.SIGTERM) is own
"""


def test_a_handler_that_code_within_the_block_installs_stays() -> None:
    assert forked.run([sys.executable, "-c", _REPLACED]).returncode == 0
