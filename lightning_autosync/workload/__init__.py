"""The workload of a model: its variables, the ready times of their gradients, and their sparsity."""

from __future__ import annotations

from lightning_autosync.workload import catalogue
from lightning_autosync.workload.capture import capture
from lightning_autosync.workload.description import (
    IGNORED,
    describe,
    shared_buffers,
    shared_parameters,
    shortened_rows,
    variable_names,
)
from lightning_autosync.workload.spec import Variable, Workload

__all__ = [
    "IGNORED",
    "Variable",
    "Workload",
    "capture",
    "catalogue",
    "describe",
    "shared_buffers",
    "shared_parameters",
    "shortened_rows",
    "variable_names",
]
