"""``autosync-timelines/1``: timelines of one step by title, kept so that reports can draw them again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from lightning_autosync.documents import check_format, checked, read_data, write_text
from lightning_autosync.errors import DocumentError
from lightning_autosync.replay import Timeline

FORMAT = "autosync-timelines/1"
TIMELINES = "timelines.json"
"""Name of the file in a run directory."""


def save_timelines(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines by title, ``predicted`` and ``measured`` for example."""
    data = {"format": FORMAT, "timelines": {title: one.to_dict() for title, one in timelines.items()}}
    write_text(path, json.dumps(data) + "\n")


def load_timelines(path: str | os.PathLike[str]) -> dict[str, Timeline]:
    """Read timelines by title.

    Raises:
        DocumentError: the file is not one of timelines.
    """
    data = read_data(path)
    if not isinstance(data, dict):
        raise DocumentError(f"{path}: expected a mapping of fields, got {type(data).__name__}")
    check_format(data.get("format"), FORMAT, str(path), DocumentError)
    return checked(dict[str, Timeline], data.get("timelines"), f"{path}: timelines")
