"""Plans how data-parallel Lightning jobs synchronize: ``Trainer(strategy="autosync")``.

Importing the package registers its strategies, whether Lightning was imported before or is imported later. The import
loads neither Lightning nor torch: every public name below is imported on first use, and ``__version__`` is then read
from the metadata of the installed package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_autosync.strategy.registration import register_strategies

if TYPE_CHECKING:
    from lightning_autosync.cluster import ClusterSpec
    from lightning_autosync.hybrid import HybridPlan
    from lightning_autosync.plan import SyncPlan, builders
    from lightning_autosync.strategy.autoddl_lightning import AutoDDLStrategy
    from lightning_autosync.strategy.fabric import AutoSyncFabricStrategy
    from lightning_autosync.strategy.lightning import AutoSyncStrategy
    from lightning_autosync.strategy.monitor.lightning import SyncMonitor
    from lightning_autosync.strategy.shares.sampler import GlobalBatches
    from lightning_autosync.strategy.shares.streams import GlobalStream
    from lightning_autosync.strategy.tuning.settings import TuningSettings
    from lightning_autosync.workload import Workload

    __version__: str

_HOMES = {
    "AutoDDLStrategy": "strategy.autoddl_lightning",
    "AutoSyncFabricStrategy": "strategy.fabric",
    "AutoSyncStrategy": "strategy.lightning",
    "ClusterSpec": "cluster",
    "GlobalBatches": "strategy.shares.sampler",
    "GlobalStream": "strategy.shares.streams",
    "HybridPlan": "hybrid",
    "SyncMonitor": "strategy.monitor.lightning",
    "SyncPlan": "plan",
    "TuningSettings": "strategy.tuning.settings",
    "Workload": "workload",
    "builders": "plan",
}

__all__ = [
    "AutoDDLStrategy",
    "AutoSyncFabricStrategy",
    "AutoSyncStrategy",
    "ClusterSpec",
    "GlobalBatches",
    "GlobalStream",
    "HybridPlan",
    "SyncMonitor",
    "SyncPlan",
    "TuningSettings",
    "Workload",
    "__version__",
    "builders",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # late: this import takes as long as the rest of this module

        return version("lightning-autosync")
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
