"""``autosync-fit/2``: the result of ``autosync fit``."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_autosync.documents import Index, Record, Result
from lightning_autosync.lab.fitting.comparison import Comparison, FitRun
from lightning_autosync.lab.fitting.splits import FitSettings


class FittedDataset(Record):
    """What simulators learned from.

    Attributes:
        samples: number of samples.
        clusters, families: names of the clusters and of the families of models.
    """

    samples: Index
    clusters: tuple[str, ...]
    families: tuple[str, ...]


class FitResult(Result):
    """The comparison of simulators, and how long it took.

    Attributes:
        constants: document of the hosts' constants.
        dataset: what simulators learned from.
        comparison: summaries by split, simulator and metric.
        runs: all runs of the comparison.
        seconds: seconds of encoding, comparison and fitting.
    """

    FORMAT: ClassVar[str] = "autosync-fit/2"

    settings: FitSettings
    constants: dict[str, Any]
    dataset: FittedDataset
    comparison: Comparison
    runs: tuple[FitRun, ...]
    seconds: dict[str, float]
