"""A Ctrl-C while nothing else is under way."""

from __future__ import annotations

import subprocess
import sys

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
    assert subprocess.run([sys.executable, "-c", _ENDS_AT_ONCE]).returncode == interrupts.STATUS
