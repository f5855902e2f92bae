"""Scales a workload without changing its structure."""

from __future__ import annotations

import math
from typing import Any

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.spec import Variable, Workload

WIDTHS = 2
"""Number of leading axes of a weight that are widths (features out and in, rows and features); the rest is a kernel."""


def scaled(workload: Workload, factor: float) -> Workload:
    """The workload with about ``factor`` times the bytes and the computation time.

    Widths, table rows and touched rows are multiplied by ``sqrt(factor)``, as in a network that is wider by this ratio:
    the work of its products scales with its weights. Names, number of variables, kernels and the order of gradients
    stay.

    Raises:
        WorkloadError: the factor is not above zero or not finite.
    """
    _check_above_zero("scale", factor)
    root = math.sqrt(factor)
    variables = tuple(_scaled(variable, root, factor) for variable in workload.variables)
    return _with_times(workload, variables, factor)


def with_compute(workload: Workload, seconds: float) -> Workload:
    """The workload with all times scaled so that forward and backward together take ``seconds``.

    Raises:
        WorkloadError: the workload's times are unknown, or ``seconds`` is not above zero or not finite.
    """
    _check_above_zero("compute", seconds)
    known = workload.forward_time + workload.backward_time
    if known <= 0:
        raise WorkloadError(f"workload '{workload.name}': its times are unknown, so they cannot be scaled")
    factor = seconds / known
    variables = tuple(variable.model_copy(update=_later(variable, factor)) for variable in workload.variables)
    return _with_times(workload, variables, factor)


def _scaled(variable: Variable, root: float, factor: float) -> Variable:
    shape = tuple(
        max(1, round(length * root)) if axis < WIDTHS else length for axis, length in enumerate(variable.shape)
    )
    rows = None if variable.rows is None else min(shape[0], max(1.0, variable.rows * root))
    return variable.model_copy(update={"shape": shape, "rows": rows, **_later(variable, factor)})


def _later(variable: Variable, factor: float) -> dict[str, Any]:
    return {} if variable.ready is None else {"ready": variable.ready * factor}


def _with_times(workload: Workload, variables: tuple[Variable, ...], factor: float) -> Workload:
    times = {name: getattr(workload, name) * factor for name in ("forward_time", "backward_time", "optimizer_time")}
    return workload.model_copy(update={"variables": variables, **times})


def _check_above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise WorkloadError(f"{name}: must be above zero and finite, got {value!r}")
