"""The workload of a model: its variables, the ready times of their gradients, and their sparsity.

What reads modules is imported on first use: it needs torch, which takes long to import, and predictions do not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_autosync.workload import catalogue
from lightning_autosync.workload.spec import Variable, Workload

if TYPE_CHECKING:
    from lightning_autosync.workload.capturing import capture
    from lightning_autosync.workload.description import (
        IGNORED,
        describe,
        large_tables,
        shared_buffers,
        shared_parameters,
        shortened_rows,
        variable_names,
    )

__all__ = [
    "IGNORED",
    "Variable",
    "Workload",
    "capture",
    "catalogue",
    "describe",
    "large_tables",
    "shared_buffers",
    "shared_parameters",
    "shortened_rows",
    "variable_names",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    home = "capturing" if name == "capture" else "description"
    found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return found
