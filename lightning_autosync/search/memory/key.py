"""`TuningKey`: the part of a job that decides whether an earlier plan fits it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from lightning_autosync.cluster.shapes import MOST_RANKS
from lightning_autosync.documents import Count, Record, digest
from lightning_autosync.plan import Semantics
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
