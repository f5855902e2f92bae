"""``autosync-validation/1``: the result of ``autosync validate``."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_autosync.documents import Record, Result
from lightning_autosync.lab.validation.accuracy import Priced, ReplayAccuracy
from lightning_autosync.lab.validation.settings import ValidationSettings


class CaseResult(Record):
    """One case: where it was measured, what its plan is, and its times.

    Attributes:
        key: key of its measurement.
        cluster: name of the cluster.
        family: model of the catalogue.
        kind: how the plan was drawn.
        messages: number of the plan's groups.
        bytes: bytes of gradients.
        measured_seconds, predicted_seconds: seconds of a step.
        measured_noise: standard error of the measured time, relative to it.
        foreign_cores: number of cores that other processes kept busy; None if unknown.
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
    """How well predictions agree with measurements.

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
