"""Measured steps: what simulators are trained on and judged by.

A dataset is a folder: ``manifest.json`` with the SHA-256 of every part, and Parquet parts, which never change. Parts of
the table ``samples`` have the columns of `COLUMNS`; they name workloads, clusters and environments by fingerprint,
and those are once in parts of the table ``documents`` (kind, fingerprint, canonical JSON).
"""

from __future__ import annotations

from lightning_autosync.learned.dataset.dataset import Dataset
from lightning_autosync.learned.dataset.sample import COLUMNS, Conditions, Entry, Sample, sample_key
from lightning_autosync.learned.dataset.writer import Writer

__all__ = ["COLUMNS", "Conditions", "Dataset", "Entry", "Sample", "Writer", "sample_key"]
