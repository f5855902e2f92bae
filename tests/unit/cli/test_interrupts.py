"""A Ctrl-C while nothing else is under way."""

from __future__ import annotations

import sys

import forked

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
