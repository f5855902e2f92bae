"""What each rank of a torchrun job says at its end, for the launcher that waits for it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_autosync.documents import write_text


class RankReport(Callback):
    """Writes ``rank_N.json``: how the rank's job ended, and what it returned.

    Args:
        directory: where to.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"rank_{os.environ['RANK']}.json"

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        found = job_return._return_value  # `return_value` would raise what the job raised
        failed = job_return.status is not JobStatus.COMPLETED
        report = {
            "status": job_return.status.name,
            "error": f"{type(found).__name__}: {found}" if failed else None,
            "return_value": None if failed else _plain(found),
        }
        write_text(self._path, json.dumps(report) + "\n")


def _plain(value: Any) -> Any:
    """What JSON can hold of a job's return value: numbers, text, and lists and mappings of them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    with suppress(ValueError):  # a run that found nothing has no number
        return float(value) if hasattr(value, "__float__") else None
    return None
