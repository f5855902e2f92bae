"""Callbacks that log how a job synchronizes.

`lightning.SyncMonitor` is the callback for lightning.pytorch, `pytorch.SyncMonitor` for pytorch_lightning.
"""
