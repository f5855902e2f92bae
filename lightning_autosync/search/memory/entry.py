"""`TunedPlan`: a document with the plan that a job found by tuning, the job (`TuningKey`), and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AwareDatetime, Field, field_serializer, field_validator, model_validator

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.cluster.shapes import MOST_RANKS
from lightning_autosync.documents import Count, Document, Index, PositiveDuration, Record, digest
from lightning_autosync.plan import SEMANTICS, Semantics, SyncPlan
from lightning_autosync.workload import Workload

Text = Annotated[str, Field(min_length=1, max_length=500)]


class TuningKey(Record):
    """The model, the hosts and the settings of a job. Rates are no part: none is known when a job looks for its plan.

    Attributes:
        workload: the trainable parameters; times and numbers of touched rows are dropped.
        hosts: [ranks] name of each rank's host, its address or both; ranks on one host have the same.
        device: type of the devices that compute, for example ``cpu`` or ``cuda``.
        semantics: the least exact semantics that the job allows.
        bucket_bytes: bytes of a fused message; None for the builders' own size.
        overlap: ``step`` if steps overlap with the next forward pass.
        package: version of this package.
        torch: the first two numbers of torch's version.
    """

    workload: Workload
    hosts: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MOST_RANKS)]
    device: Text
    semantics: Semantics = "exact"
    bucket_bytes: Count | None = None
    overlap: Literal["step"] | None = None
    package: Text
    torch: Annotated[str, Field(pattern=r"^\d{1,9}\.\d{1,9}$")]

    @classmethod
    def of(
        cls,
        workload: Workload,
        hosts: Sequence[str],
        device: str,
        semantics: Semantics = "exact",
        bucket_bytes: int | None = None,
        overlap: Literal["step"] | None = None,
    ) -> TuningKey:
        """The key of a job that runs with the installed versions; the arguments are the attributes of this class.

        Raises:
            ValueError: an argument is wrong.
        """
        return cls(
            workload=workload,
            hosts=tuple(hosts),
            device=device,
            semantics=semantics,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            package=version("lightning-autosync"),
            torch=".".join(version("torch").split(".")[:2]),
        )

    @cached_property
    def model(self) -> str:
        """Digest of names, shapes, dtypes and kinds of the parameters."""
        return digest([[one.name, one.shape, one.dtype, one.kind] for one in self.workload.variables])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all parts; the name of the model is none of them."""
        return digest([self.model, self.model_dump(mode="json", exclude={"workload"})])

    @field_validator("workload", mode="before")
    @classmethod
    def _read(cls, data: Any) -> Workload:
        read = data if isinstance(data, Workload) else Workload.from_dict(data)
        variables = tuple(one.model_copy(update={"ready": None, "rows": None}) for one in read.variables)
        return Workload(name=read.name, variables=variables)

    @field_serializer("workload")
    def _write(self, workload: Workload) -> dict[str, Any]:
        return workload.to_dict()


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
        cluster: the cluster as the job found it, with the rates of its links.
        evidence: predicted and measured step times.
        written: time at which the entry was written.
        torch: torch's whole version.
        unfinished: whether the job ended before its trials did.
    """

    FORMAT: ClassVar[str] = "autosync-tuned/1"

    key: TuningKey
    plan: SyncPlan
    origin: Text
    cluster: ClusterSpec
    evidence: Evidence
    written: AwareDatetime
    torch: Text
    unfinished: bool = False

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
        if not self.cluster.measured:
            raise ValueError("cluster: the rates of its links are missing, but a job that tunes itself knows them")
        if self.plan.workload not in (None, workload.variables_fingerprint):
            raise ValueError("plan.workload: the plan was made for other parameters than those of key.workload")
        named = {name for group in self.plan.groups for name in group.variables}
        if named != {variable.name for variable in workload.variables}:
            raise ValueError("plan.groups: their variables are not those of key.workload")
        if SEMANTICS.index(self.plan.semantics) > SEMANTICS.index(self.key.semantics):
            raise ValueError(f"plan: its semantics are {self.plan.semantics}, but key allows {self.key.semantics}")
        return self
