"""Folders that cannot be written to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of that size; the test is skipped where there can be none."""
    with _mounted(folder, ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs"]):
        yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The folder, which even root cannot write to; the test is skipped where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    with _mounted(folder, ["-o", "bind,ro", str(folder)]):
        yield folder


@contextmanager
def _mounted(folder: Path, options: list[str]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("to mount a file system needs root")
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
