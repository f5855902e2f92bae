from lightning_autosync.search.sampler import AutoSyncSampler

__all__ = ["AutoSyncSampler"]
