"""`AutoSyncSampler`: an Optuna sampler that predicts the times of a population of plans before it proposes one."""

from __future__ import annotations

from lightning_autosync.search.sampler.sampler import AutoSyncSampler

__all__ = ["AutoSyncSampler"]
