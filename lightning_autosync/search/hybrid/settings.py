"""Whether a tuning run may split operators, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from lightning_autosync.cluster import Bytes
from lightning_autosync.documents import Count, Record


class ParallelSettings(Record):
    """What a tuning run may change.

    Attributes:
        kind: ``data``: how gradients are synchronized. ``hybrid``: also how operators are split over a mesh of ranks.
        memory: bytes that a rank may use, for ``hybrid``; None for any number.
        rates: path of a file of rates that an earlier run left; None measures them on the live workers.
        trials: plans that split operators and are measured.
    """

    kind: Literal["data", "hybrid"] = "data"
    memory: Bytes | None = None
    rates: str | None = None
    trials: Count = 8

    @model_validator(mode="after")
    def _check(self) -> ParallelSettings:
        if self.kind == "data":
            for name in ("memory", "rates"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: is for parallel=hybrid")
        return self
