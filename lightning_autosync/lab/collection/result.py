"""``autosync-collection/1``: the result of ``autosync collect``."""

from __future__ import annotations

from typing import ClassVar

from lightning_autosync.documents import Index, Result
from lightning_autosync.lab.collection.settings import CollectionSettings


class CollectionResult(Result):
    """What one run of the command did.

    Attributes:
        dataset: absolute path of the dataset.
        pairs: number of pairs in the dataset after the run.
        seconds: seconds of the run.
        measured, disturbed, failed, drawing, measuring, stepping: as in `Progress`.
    """

    FORMAT: ClassVar[str] = "autosync-collection/1"

    settings: CollectionSettings
    dataset: str
    pairs: Index
    seconds: float
    measured: Index
    disturbed: Index
    failed: tuple[dict[str, str], ...]
    drawing: float
    measuring: float
    stepping: float
