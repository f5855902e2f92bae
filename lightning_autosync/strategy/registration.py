"""Registers strategy names for ``Trainer(strategy=...)`` and ``Fabric(strategy=...)``.

Lightning has no entry point for strategies, and a name must be in its registry before a Trainer is made. Importing
Lightning here would cost worker processes and command-line tools seconds. The names are therefore registered when
Lightning itself is imported.
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
"""Arguments by registered name."""

_PLACES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "lightning.pytorch.strategies": (
        "StrategyRegistry",
        {"autosync": ("lightning", "AutoSyncStrategy"), "autoddl": ("autoddl_lightning", "AutoDDLStrategy")},
    ),
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        {"autosync": ("pytorch", "AutoSyncStrategy"), "autoddl": ("autoddl_pytorch", "AutoDDLStrategy")},
    ),
    "lightning.fabric.strategies": (
        "STRATEGY_REGISTRY",
        {"autosync": ("fabric", "AutoSyncFabricStrategy"), "autoddl": ("fabric", "refuse_autoddl")},
    ),
}
"""Registries, by the module that holds them: name of the registry, and our module and class (or a function
that says why there is none) by the first word of a strategy's name."""


def register_strategies() -> None:
    """Register the strategies with each framework: now if it is imported, otherwise when it is imported."""
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
    """Make the strategy. Its module is imported only now, because it imports the module with the registry."""
    return getattr(import_module(f"lightning_autosync.strategy.{module}"), class_name)(**arguments)


class _Watcher(MetaPathFinder):
    """An import hook that finds the modules of `_PLACES` as Python would, and fills each registry after execution."""

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
