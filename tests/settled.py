"""Imported last by the server of `forked`: makes its forks cheap.

Python's collector would visit a million objects in each fork, and write to them: the kernel would copy the pages. And
the kernel copies the page tables for each fork, which huge pages make short. Every Trainer looks for entry points in
the metadata of all installed packages, which do not change while tests run. Nor do files of configurations, which
commands read. At the end of a fork, torch would take back each operator that one of its modules has registered.
And with each seed, torch notes the stack three times, for devices that it has not started yet.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from pathlib import Path

import torch
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
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device._lazy_call = lambda call, **options: None  # type: ignore[attr-defined]
gc.collect()
use_huge_pages()
gc.freeze()
gc.enable()
