"""Registers the names that ``Trainer(strategy=...)`` and ``Fabric(strategy=...)`` know.

Lightning has no entry point for strategies, and a name must be in its registry before a Trainer is made.
Importing Lightning takes seconds that worker processes and command-line tools need not spend, so a registry
that is not there yet is filled at the moment when Lightning itself is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "autosync": {"start_method": "popen"},
    "autosync_spawn": {"start_method": "spawn"},
    "autosync_fork": {"start_method": "fork"},
    "autosync_notebook": {"start_method": "fork"},
    "autosync_allreduce": {"plan": "all_reduce"},
    "autosync_ps": {"plan": "ps_load_balancing"},
    "autosync_partial_reduce": {"plan": "partial_reduce", "semantics": "relaxed"},
    "autoddl": {},
}
"""Registered name, and the arguments that it stands for."""

_PLACES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "lightning.pytorch.strategies": (
        "StrategyRegistry",
        {"autosync": ("lightning", "AutoSyncStrategy"), "autoddl": ("autoddl_lightning", "AutoDDLStrategy")},
    ),
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        {"autosync": ("pytorch", "AutoSyncStrategy"), "autoddl": ("autoddl_pytorch", "AutoDDLStrategy")},
    ),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", {"autosync": ("fabric", "AutoSyncFabricStrategy")}),
}
"""Module that holds a registry: the registry's name, and by the first word of a strategy's name our module beside this
one and the class in it."""


def register_strategies() -> None:
    """Fill the registries of frameworks that are imported, and of the others once they are."""
    for name in _PLACES:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _register(place: ModuleType) -> None:
    registry_name, classes = _PLACES[place.__name__]
    registry = getattr(place, registry_name)
    for name, arguments in STRATEGIES.items():
        home = classes.get(name.split("_")[0])
        if home is None:
            continue
        told = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        description = f"{home[1]} with {told or 'its defaults'}"
        registry.register(name, partial(_create, *home), description=description, override=True, **arguments)


def _create(module: str, class_name: str, **arguments: Any) -> Any:
    """The strategy; its module is imported only now, for it imports the one that holds the registry."""
    return getattr(import_module(f"lightning_autosync.strategy.{module}"), class_name)(**arguments)


class _Watcher(MetaPathFinder):
    """Finds the modules of `_PLACES` as Python would, and has each registered to once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _PLACES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
