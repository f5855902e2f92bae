"""Settings that allow a tuning run to split operators."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from lightning_autosync.cluster import Bytes
from lightning_autosync.documents import Count, Record


class ParallelSettings(Record):
    """What a tuning run may change.

    Attributes:
        kind: ``data`` tunes how gradients are synchronized. ``hybrid`` also tunes how operators are split over a mesh.
        memory: maximum bytes of a rank, for ``hybrid``; None for no limit.
        rates: file of rates from an earlier run; None measures them on the live workers.
        trials: number of plans with split operators to measure.
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
                    raise ValueError(f"{name}: allowed with parallel=hybrid only")
        return self
