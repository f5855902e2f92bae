"""Datasets of measured steps, for training and evaluating simulators.

A dataset is a folder with ``manifest.json``, which has the SHA-256 of every part, and with Parquet parts, which never
change. Parts of the table ``samples`` have the columns of `COLUMNS` and refer to workloads, clusters and environments
by fingerprint. Parts of the table ``documents`` contain each of these once (kind, fingerprint, canonical JSON).
"""

from __future__ import annotations

from lightning_autosync.learned.dataset.dataset import Dataset
from lightning_autosync.learned.dataset.sample import COLUMNS, Conditions, Entry, Sample, sample_key
from lightning_autosync.learned.dataset.writer import Writer

__all__ = ["COLUMNS", "Conditions", "Dataset", "Entry", "Sample", "Writer", "sample_key"]
