"""Packages that look as if they were not installed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from types import ModuleType

from lightning_autosync.errors import EXTRAS

DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn"}
"""Names under which pip knows packages, if they are not those under which Python imports them."""


class _Refuses(MetaPathFinder):
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def hide(packages: Collection[str] = tuple(EXTRAS)) -> None:
    """Hide packages from all imports of this process from now on, and from those who ask for their versions.

    Raises:
        AssertionError: one of them is imported already.
    """
    assert not set(packages) & set(sys.modules)
    sys.meta_path.insert(0, _Refuses(packages))
    hidden, find = {DISTRIBUTIONS.get(name, name) for name in packages}, metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name.lower().replace("_", "-") in hidden:
            raise metadata.PackageNotFoundError(name)
        return find(name)

    metadata.Distribution.from_name = staticmethod(from_name)  # type: ignore[method-assign, assignment]
