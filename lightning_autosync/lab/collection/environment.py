"""What samples are measured on: whatever may change speed and stays for a whole run."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_autosync.measure.workers.cores import usable_cores

_PACKAGES = ("lightning-autosync", "torch", "numpy")


def describe_environment(worker: dict[str, Any]) -> dict[str, Any]:
    """The machine and the software as plain data; ``worker`` is what a worker says of itself."""
    return {
        **worker,
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in _PACKAGES},
        "emulated": {"links": True, "compute": True},
    }


def _processor() -> str:
    """The model name of the first core, as Linux has it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
