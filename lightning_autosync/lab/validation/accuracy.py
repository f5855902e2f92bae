"""Errors of predictions, and whether predictions rank plans in the right order."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
from scipy.stats import kendalltau

from lightning_autosync.documents import Record, Result
from lightning_autosync.lab.validation.cases import Case
from lightning_autosync.lab.validation.settings import ValidationSettings
from lightning_autosync.learned.training import distinct_pairs

RANKED = 0.8
"""Kendall's tau that predictions for one workload on one cluster should reach."""
_LEAST_RANKED = 3
"""Least number of cases of a pair for which their order is judged."""


@dataclass(frozen=True)
class Priced:
    """A case with its measured and its predicted step time.

    Attributes:
        measured, predicted: seconds of a step.
        foreign_cores: number of cores that other processes kept busy during the measurement; None if unknown.
        noise: standard error of the measured time, relative to it.
    """

    case: Case
    measured: float
    predicted: float
    foreign_cores: float | None
    noise: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if it is too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Order:
    """How well the plans for one workload on one cluster are ranked.

    Attributes:
        tau, tau_apart: as in `ReplayAccuracy`.
        pairs: number of pairs of plans.
        distinct: number of these whose times differ by more than noise.
    """

    tau: float
    tau_apart: float | None
    pairs: int
    distinct: int

    @staticmethod
    def of(ranked: Sequence[Priced]) -> Order:
        """The order of at least two cases."""
        measured, predicted, noise = (
            numpy.array([getattr(one, field) for one in ranked]) for field in ("measured", "predicted", "noise")
        )
        upper = numpy.triu_indices(len(ranked), 1)
        # No reference is measured beside the cases, so drift between them is unknown and taken as none.
        steady, together = numpy.zeros(len(ranked)), numpy.zeros(len(ranked), dtype=numpy.int64)
        distinct = distinct_pairs(numpy.log(measured), noise, steady, together)[upper]
        signs = [numpy.sign(times[upper[0]] - times[upper[1]])[distinct] for times in (measured, predicted)]
        return Order(
            tau=kendall_tau(measured.tolist(), predicted.tolist()),
            tau_apart=float((signs[0] * signs[1]).mean()) if distinct.any() else None,
            pairs=len(distinct),
            distinct=int(distinct.sum()),
        )


@dataclass(frozen=True)
class ReplayAccuracy:
    """The accuracy of predictions for a set of cases.

    Attributes:
        cases: number of cases.
        median: median of the absolute relative errors.
        p90: 90th percentile of the absolute relative errors.
        bias: median of the signed relative errors; positive if predictions are too long.
        tau: Kendall's tau-b of measured and predicted times, the mean over workloads and clusters with at least three
            plans; None if there are none.
        tau_apart: the same over pairs of plans whose times differ by more than their measurement noise, since others
            have no order to predict; None if there are none.
        within_noise: share of pairs of plans that ``tau_apart`` leaves out; None without pairs.
    """

    cases: int
    median: float
    p90: float
    bias: float
    tau: float | None
    tau_apart: float | None
    within_noise: float | None

    @staticmethod
    def of(priced: Sequence[Priced]) -> ReplayAccuracy:
        """The accuracy of at least one case."""
        errors = numpy.array([one.error for one in priced])
        orders = [Order.of(pair) for pair in _pairs(priced)]
        pairs = sum(order.pairs for order in orders)
        return ReplayAccuracy(
            cases=len(priced),
            median=float(numpy.median(abs(errors))),
            p90=float(numpy.quantile(abs(errors), 0.9)),
            bias=float(numpy.median(errors)),
            tau=_mean([order.tau for order in orders]),
            tau_apart=_mean([order.tau_apart for order in orders]),
            within_noise=1 - sum(order.distinct for order in orders) / pairs if pairs else None,
        )


def by(priced: Iterable[Priced], what: Callable[[Priced], str]) -> dict[str, ReplayAccuracy]:
    """The accuracy of each part of the cases."""
    return {name: ReplayAccuracy.of(part) for name, part in sorted(_parts(priced, what).items())}


def _pairs(priced: Sequence[Priced]) -> list[list[Priced]]:
    """The cases of each workload on each cluster with enough cases to judge their order."""
    pairs = _parts(priced, lambda one: one.case.pair).values()
    return [ranked for ranked in pairs if len(ranked) >= _LEAST_RANKED]


def _parts(priced: Iterable[Priced], what: Callable[[Priced], str]) -> dict[str, list[Priced]]:
    parts: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        parts[what(one)].append(one)
    return parts


def _mean(taus: Sequence[float | None]) -> float | None:
    known = [tau for tau in taus if tau is not None]
    return statistics.mean(known) if known else None


def kendall_tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Kendall's tau-b; 0 if all times on one side are equal."""
    tau = float(kendalltau(measured, predicted).statistic)
    return 0.0 if numpy.isnan(tau) else tau


class CaseResult(Record):
    """One case: where it was measured, what its plan is, and its times; see `Case` and `Priced`.

    Attributes:
        key: key of its measurement.
        cluster: name of the cluster.
        messages: number of the plan's groups.
        bytes: bytes of gradients.
        measured_seconds, predicted_seconds: seconds of a step.
    """

    key: str
    cluster: str
    family: str
    kind: str
    messages: int
    bytes: int
    measured_seconds: float
    measured_noise: float
    predicted_seconds: float
    foreign_cores: float | None

    @classmethod
    def of(cls, priced: Priced) -> CaseResult:
        case = priced.case
        return cls(
            key=case.key,
            cluster=case.cluster.name,
            family=case.family,
            kind=case.kind,
            messages=len(case.plan.groups),
            bytes=case.workload.bytes,
            measured_seconds=priced.measured,
            measured_noise=priced.noise,
            predicted_seconds=priced.predicted,
            foreign_cores=priced.foreign_cores,
        )


class ValidationResult(Result):
    """``autosync-validation/1``: how well predictions agree with measurements.

    Attributes:
        constants: document of the hosts' constants.
        emulated: whether links and computation are emulated.
        accuracy: accuracy by table (all, cluster, workload, plan, pair) and row.
    """

    FORMAT: ClassVar[str] = "autosync-validation/1"

    settings: ValidationSettings
    constants: dict[str, Any]
    emulated: dict[str, bool]
    accuracy: dict[str, dict[str, ReplayAccuracy]]
    cases: tuple[CaseResult, ...]

    def figures(self) -> dict[str, str]:
        whole = self.accuracy["all"]["all"]
        found = {"cases": str(whole.cases), "median error": f"{whole.median:.1%}", "p90 error": f"{whole.p90:.1%}"}
        return found if whole.tau is None else {**found, "Kendall tau": f"{whole.tau:.2f}"}
