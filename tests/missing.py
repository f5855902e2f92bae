"""Packages that look as if they were not installed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType

from lightning_autosync.errors import EXTRAS

DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn"}
"""Names under which pip knows packages, if they are not those under which Python imports them."""


class _Hides(MetaPathFinder):
    """Python's own finder of modules and of installed packages, except that it does not see some of them."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = frozenset(packages)
        self._distributions = {DISTRIBUTIONS.get(name, name) for name in packages}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._packages:
            return None
        return PathFinder.find_spec(fullname, path, target)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        if (context.name or "").lower().replace("_", "-") in self._distributions:
            return []
        return PathFinder.find_distributions(context)


def hide(packages: Collection[str] = (*EXTRAS, "transformers")) -> None:
    """Hide packages from this process from now on; transformers is one that only tests install, and needs safetensors.

    Raises:
        AssertionError: one of them is imported already.
    """
    assert not set(packages) & set(sys.modules)
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Hides(packages)
