"""Configuration files of this package and of Hydra are parsed once in each process.

Hydra parses a file again whenever a configuration is composed that has it, and tests compose hundreds of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from lightning_autosync.cluster import configuration_directory

_FOLDERS = tuple(folder.resolve() for folder in (configuration_directory(), Path(hydra.__file__).parent))
"""Where files do not change while tests run."""


@cache
def remember() -> None:
    """Let ``OmegaConf.load`` return copies of what it read before."""
    load: Callable[[Any], Any] = OmegaConf.load
    found: dict[Path, Any] = {}

    def remembered(source: Any) -> Any:
        path = Path(str(getattr(source, "name", source))).resolve()
        if not any(path.is_relative_to(folder) for folder in _FOLDERS):
            return load(source)
        if path not in found:
            found[path] = load(source)
        return copy.deepcopy(found[path])

    OmegaConf.load = staticmethod(remembered)  # type: ignore[method-assign, assignment]


def read_all() -> None:
    """Parse the files of this package, for processes that are forked from this one."""
    for path in configuration_directory().glob("**/*.yaml"):
        OmegaConf.load(path)
