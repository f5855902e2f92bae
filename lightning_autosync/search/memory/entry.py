"""`TunedPlan`: a document with the plan that a job found by tuning, and the evidence for it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import AwareDatetime, field_serializer, field_validator, model_validator

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Count, Document, Index, PositiveDuration, Record
from lightning_autosync.plan import SEMANTICS, SyncPlan
from lightning_autosync.search.memory.key import Text, TuningKey

_EMBEDDED: dict[str, type[Document]] = {"plan": SyncPlan, "cluster": ClusterSpec}


class StepTime(Record):
    """The measured step time of a plan.

    Attributes:
        name: name of the plan for people.
        plan: fingerprint of the plan.
        seconds: median of a step.
        steps: number of measured steps.
    """

    name: Text
    plan: Text
    seconds: PositiveDuration
    steps: Count


class Evidence(Record):
    """The reasons why a plan was chosen.

    Attributes:
        predicted: predicted seconds of a step; None without a prediction.
        measured: step time of the chosen plan.
        compared: step times of other plans in the same job; first that of the plan with which the job began.
        synchronized_steps: number of synchronized steps that the job had done.
    """

    predicted: PositiveDuration | None = None
    measured: StepTime
    compared: tuple[StepTime, ...] = ()
    synchronized_steps: Index

    @property
    def speedup(self) -> float | None:
        """Speedup over the plan with which the job began; None if no other plan was measured."""
        return self.compared[0].seconds / self.measured.seconds if self.compared else None


class TunedPlan(Document):
    """A plan that a job found by tuning.

    Attributes:
        key: the job.
        plan: the plan.
        origin: the source of the plan in a few words, for example ``packed trees``.
        cluster: the cluster as the job found it, with its rates.
        evidence: predicted and measured step times.
        written: time at which the entry was written.
        torch: torch's whole version.
    """

    FORMAT: ClassVar[str] = "autosync-tuned/1"

    key: TuningKey
    plan: SyncPlan
    origin: Text
    cluster: ClusterSpec
    evidence: Evidence
    written: AwareDatetime
    torch: Text

    @field_validator("plan", "cluster", mode="before")
    @classmethod
    def _read(cls, data: Any, info: Any) -> Any:
        kind = _EMBEDDED[info.field_name]
        return data if isinstance(data, kind) else kind.from_dict(data)

    @field_serializer("plan", "cluster")
    def _write(self, document: Document) -> dict[str, Any]:
        return document.to_dict()

    @model_validator(mode="after")
    def _check(self) -> TunedPlan:
        ranks, workload = len(self.key.hosts), self.key.workload
        for name, found in (("plan.world_size", self.plan.world_size), ("cluster", self.cluster.world_size)):
            if found != ranks:
                raise ValueError(f"{name}: {found} ranks, but key.hosts has {ranks}")
        if self.plan.workload not in (None, workload.variables_fingerprint):
            raise ValueError("plan.workload: the plan was made for other parameters than those of key.workload")
        named = {name for group in self.plan.groups for name in group.variables}
        if named != {variable.name for variable in workload.variables}:
            raise ValueError("plan.groups: their variables are not those of key.workload")
        if SEMANTICS.index(self.plan.semantics) > SEMANTICS.index(self.key.semantics):
            raise ValueError(f"plan: its semantics are {self.plan.semantics}, but key allows {self.key.semantics}")
        return self
