"""What a bench run found: every step of every round, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightning_autosync.bench.settings import Settings
from lightning_autosync.bench.statistics import Interval, paired_ratio, relative_medians, round_time
from lightning_autosync.cluster import ClusterSpec

FORMAT = "autosync-bench/1"
FRAMING = 1514 / 1448
"""Bytes of a full Ethernet frame over its payload, with TCP/IPv4 and timestamps."""

Round = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Measurement:
    """One contender.

    Attributes:
        rounds: seconds, by round, rank and step.
        sent: bytes on the wire per step and rank, by round; None where they cannot be counted.
        foreign_cores: cores that other processes kept busy meanwhile, by round; None where unknown.
        deviation: relative difference of its first gradients to those of the first DDP contender.
    """

    rounds: Sequence[Round]
    sent: Sequence[float] | None
    foreign_cores: Sequence[float] | None
    deviation: float

    @cached_property
    def times(self) -> list[float]:
        """Seconds a step, by round."""
        return [round_time(steps_by_rank) for steps_by_rank in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that a rank sent in a step, the median over rounds."""
        return statistics.median(self.sent) if self.sent is not None else None


@dataclass(frozen=True)
class Result:
    """One bench run.

    Attributes:
        settings: what was asked.
        cluster: the cluster as it was used, scaled and ordered.
        size: bytes of all dense gradients.
        bound: least seconds to synchronize ``size`` on the emulated links, framing included; None without.
        conditions: versions, load, policies, how bytes were counted.
        measurements: by contender, DDP first.
    """

    settings: Settings
    cluster: ClusterSpec
    size: int
    bound: float | None
    conditions: dict[str, Any]
    measurements: dict[str, Measurement]

    @cached_property
    def best_ddp(self) -> str:
        """The DDP contender that was fastest, each round's times taken relative to their median.

        So a time of foreign load does not decide which one it is.
        """
        contenders = self.settings.all_contenders()
        times = {name: m.times for name, m in self.measurements.items() if contenders[name].ddp is not None}
        return min(relative_medians(times).items(), key=lambda item: item[1])[0]

    @property
    def foreign_cores(self) -> float | None:
        """Cores that other processes kept busy, the mean over all turns; None where unknown."""
        found = [measurement.foreign_cores for measurement in self.measurements.values()]
        known = [cores for rounds in found if rounds is not None for cores in rounds]
        return statistics.mean(known) if known else None

    def ratio(self, name: str, reference: str | None = None) -> Interval:
        """A contender's time over the reference's (the best DDP's), paired by round; below 1 is faster."""
        other = self.measurements[reference or self.best_ddp]
        return paired_ratio(self.measurements[name].times, other.times)

    def bound_share(self, name: str) -> float | None:
        """Bound over median, where a step is communication only and the links are emulated; else None."""
        if self.bound is None or self.settings.model.kind != "flat":
            return None
        return self.bound / self.measurements[name].median

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "format": FORMAT,
            "settings": self.settings.model_dump(mode="json"),
            "cluster": self.cluster.to_dict(),
            "workload": {"kind": self.settings.model.kind, "bytes": self.size},
            "emulated": {"links": self.settings.launch == "emulated", "compute": False},
            "meets_protocol": self.settings.meets_protocol,
            "bound_seconds": self.bound,
            "bound_note": f"least time to synchronize the dense gradients x {FRAMING:.4f} (TCP/IP framing)",
            "conditions": self.conditions,
            "foreign_cores": self.foreign_cores,
            "best_ddp": self.best_ddp,
            "contenders": {name: self._contender(name) for name in self.measurements},
        }

    def _contender(self, name: str) -> dict[str, Any]:
        measurement = self.measurements[name]
        return {
            "median_seconds": measurement.median,
            "least_seconds": min(measurement.times),
            "most_seconds": max(measurement.times),
            "ratio_to_best_ddp": asdict(self.ratio(name)),
            "ratio_to_first_ddp": asdict(self.ratio(name, next(iter(self.measurements)))),
            "bound_share": self.bound_share(name),
            "bytes_per_step_and_rank": measurement.bytes_per_step,
            "gradient_deviation": measurement.deviation,
            "round_seconds": measurement.times,
            "round_bytes_per_step_and_rank": measurement.sent,
            "round_foreign_cores": measurement.foreign_cores,
            "step_seconds_by_round_and_rank": measurement.rounds,
        }
