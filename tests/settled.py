"""Imported last by the server of `forked`: makes its forks cheap.

Python's collector would visit a million objects in each fork, and write to them: the kernel would copy the pages. And
the kernel copies the page tables for each fork, which huge pages make short. Every Trainer looks for entry points in
the metadata of all installed packages, which do not change while tests run. Nor do files of configurations, which
commands read.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from pathlib import Path

from lightning.fabric.utilities import registry

from tests import parsed_files

MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it, and forks are slower there
HUGE = 2**21


def use_huge_pages() -> None:
    """Let the kernel put this process's anonymous memory into pages of 2 MiB, as far as it can."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(each, 16) for each in addresses.split("-"))
            begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
            if begin < end:
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


registry.entry_points = functools.cache(registry.entry_points)
parsed_files.remember()
parsed_files.read_all()
gc.collect()
use_huge_pages()
gc.freeze()
