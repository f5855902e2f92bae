"""How far predictions are from measurements, and whether they put plans in the right order."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from scipy.stats import kendalltau

from lightning_autosync.bench.validation.cases import Case

_LEAST_RANKED = 3
"""Cases of a pair from which on their order says anything."""


@dataclass(frozen=True)
class Priced:
    """A case with its two times, seconds a step, and the cores that others kept busy meanwhile."""

    case: Case
    measured: float
    predicted: float
    foreign_cores: float | None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    def to_dict(self) -> dict[str, Any]:
        """The case in plain data, its documents by fingerprint."""
        case = self.case
        return {
            "key": case.key,
            "cluster": case.cluster.name,
            "family": case.family,
            "kind": case.kind,
            "messages": len(case.plan.groups),
            "bytes": case.workload.bytes,
            "measured_seconds": self.measured,
            "predicted_seconds": self.predicted,
            "foreign_cores": self.foreign_cores,
        }


@dataclass(frozen=True)
class Accuracy:
    """Of a set of cases.

    Attributes:
        cases: how many.
        median: of the relative errors, without sign.
        p90: the same, not exceeded by nine of ten cases.
        bias: median of the relative errors with their sign; above 0 predictions are too long.
        tau: Kendall's tau-b of measured and predicted times of one workload on one cluster, the mean over those with
            at least three plans; None without.
    """

    cases: int
    median: float
    p90: float
    bias: float
    tau: float | None

    @staticmethod
    def of(priced: Sequence[Priced]) -> Accuracy:
        """The accuracy of at least one case."""
        errors = numpy.array([one.error for one in priced])
        return Accuracy(
            cases=len(priced),
            median=float(numpy.median(abs(errors))),
            p90=float(numpy.quantile(abs(errors), 0.9)),
            bias=float(numpy.median(errors)),
            tau=_mean_tau(priced),
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain data."""
        return asdict(self)


def by(priced: Iterable[Priced], what: Callable[[Priced], str]) -> dict[str, Accuracy]:
    """The accuracy of each part of the cases."""
    parts: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        parts[what(one)].append(one)
    return {name: Accuracy.of(parts[name]) for name in sorted(parts)}


def _mean_tau(priced: Sequence[Priced]) -> float | None:
    pairs: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        pairs[one.case.pair].append(one)
    taus = [
        kendall_tau([one.measured for one in ranked], [one.predicted for one in ranked])
        for ranked in pairs.values()
        if len(ranked) >= _LEAST_RANKED
    ]
    return statistics.mean(taus) if taus else None


def kendall_tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Kendall's tau-b; 0 where one side does not tell the plans apart."""
    tau = float(kendalltau(measured, predicted).statistic)
    return 0.0 if numpy.isnan(tau) else tau
