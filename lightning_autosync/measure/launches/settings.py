"""The config group ``launch``: where the workers of a verb run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Record
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches.launch import SSH, Launch, LocalLaunch, SshLaunch


class LaunchSettings(Record):
    """Where a verb runs the workers that it starts.

    Attributes:
        kind: ``local`` puts all ranks on the loopback interface, ``emulated`` behind emulated links of the cluster,
            ``ssh`` on the cluster's nodes.
        command, python, directory, interface: arguments of `SshLaunch`.
    """

    kind: Literal["local", "emulated", "ssh"] = "local"
    command: Annotated[tuple[str, ...], Field(min_length=1)] = SSH
    python: str | None = None
    directory: str | None = None
    interface: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_jobs(cls, data: Any) -> Any:
        kind = data.get("kind") if isinstance(data, dict) else None
        if kind in ("torchrun", "slurm"):
            raise ValueError(
                f"launch={kind}: this verb starts its workers itself; allowed: launch=local, emulated or ssh"
            )
        return data

    @contextmanager
    def open(self, cluster: ClusterSpec | None) -> Iterator[Launch]:
        """The launch, open while the block runs.

        Raises:
            DocumentError: the launch needs a cluster, or addresses of its nodes.
            LaunchError: workers cannot be started in this way here; the message suggests a remedy.
        """
        if self.kind == "local":
            yield LocalLaunch()
            return
        if cluster is None:
            example = "fat_node_star" if self.kind == "emulated" else "FILE (a cluster with an address for every node)"
            raise DocumentError(f"cluster: missing; launch={self.kind} needs one, for example cluster={example}")
        if self.kind == "ssh":
            yield SshLaunch(cluster, self.command, self.python, self.directory, self.interface)
            return
        try:
            launch = EmulatedLaunch(cluster)
        except LaunchError as error:
            raise LaunchError(f"launch=emulated: {error}") from None
        with launch:
            yield launch


class TorchrunSettings(Record):
    """The ranks run already: this process is a rank of a job that torchrun started."""

    kind: Literal["torchrun"]


class SlurmSettings(Record):
    """The ranks are tasks of a SLURM job: the current job if there is one, else a job that is submitted.

    Attributes:
        parameters: parameters of submitit's executor, such as ``slurm_partition``, ``timeout_min``, ``gpus_per_node``.
        wait: whether to wait until the job has ended.
    """

    kind: Literal["slurm"]
    parameters: dict[str, str | int | float | bool | list[str] | dict[str, Any]] = Field(default_factory=dict)
    wait: bool = True


AnyLaunch = Annotated[LaunchSettings | TorchrunSettings | SlurmSettings, Field(union_mode="left_to_right")]
