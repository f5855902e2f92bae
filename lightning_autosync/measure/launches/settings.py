"""Where the workers of a verb run: the config group ``launch``, and the keys of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PositiveFloat, Tag, field_validator

from lightning_autosync.cluster import ClusterSpec, Rate
from lightning_autosync.documents import Configuration, Record
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.emulation.launch import EmulatedLaunch
from lightning_autosync.measure.errors import LaunchError
from lightning_autosync.measure.launches.allocation import SlurmLaunch, open_allocation
from lightning_autosync.measure.launches.launch import SSH, Launch, LocalLaunch, SshLaunch
from lightning_autosync.measure.launches.ray_cluster import RayLaunch, connected
from lightning_autosync.ports import PortRange, listening_within, read_port_range

_Ports = Annotated[PortRange | None, AfterValidator(read_port_range)]


class LaunchSettings(Record):
    """Where a verb runs the workers that it starts.

    Attributes:
        kind: ``local`` puts all ranks on the loopback interface, ``emulated`` behind emulated links of the cluster,
            ``ssh`` on the cluster's nodes.
        command, python, directory, interface: arguments of `SshLaunch`.
        port_range: first and last port on which the ranks listen; None: those of the environment variable
            ``AUTOSYNC_PORT_RANGE``, or any free port.
    """

    kind: Literal["local", "emulated", "ssh"] = "local"
    command: Annotated[tuple[str, ...], Field(min_length=1)] = SSH
    python: str | None = None
    directory: str | None = None
    interface: str | None = None
    port_range: _Ports = None

    @contextmanager
    def open(self, cluster: ClusterSpec | None) -> Iterator[Launch]:
        """The launch, open while the block runs.

        Raises:
            DocumentError: the launch needs a cluster, or addresses of its nodes.
            LaunchError: workers cannot be started in this way here; the message suggests a remedy.
        """
        with listening_within(self.port_range), self._open(cluster) as launch:
            yield launch

    @contextmanager
    def _open(self, cluster: ClusterSpec | None) -> Iterator[Launch]:
        if self.kind == "local":
            yield LocalLaunch(1 if cluster is None else cluster.interface_count)
            return
        if cluster is None:
            raise DocumentError(needs_cluster(self.kind))
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
    """The ranks run on nodes of SLURM.

    A training runs as tasks of a job: the current job if srun started this process, else a job that is submitted. The
    other verbs start workers in the job in which they run, or in one that they request.

    Attributes:
        parameters: parameters of submitit's executor, such as ``slurm_partition``, ``timeout_min``, ``gpus_per_node``.
            The other verbs take those that are options of salloc too.
        wait: whether a training waits until its job has ended.
    """

    kind: Literal["slurm"]
    parameters: dict[str, str | int | float | bool | list[str] | dict[str, Any]] = Field(default_factory=dict)
    wait: bool = True

    @contextmanager
    def open(self, cluster: ClusterSpec | None) -> Iterator[Launch]:
        """The launch, open while the block runs; see `LaunchSettings.open`.

        Args:
            cluster: the cluster of the job; None to run a rank for each task of the nodes, whatever they are.
        """
        if not self.wait:
            raise DocumentError("launch.wait: only train submits a job without waiting for it; allowed here: true")
        shape = None if cluster is None else (len(cluster.nodes), max(node.devices for node in cluster.nodes))
        with open_allocation(shape, self.parameters) as allocation:
            yield SlurmLaunch(allocation, cluster)


class RaySettings(Record):
    """The ranks run on nodes of a Ray cluster.

    Attributes:
        address: ``HOST:PORT`` of the cluster; None: ``RAY_ADDRESS``, or the cluster with a node on this machine.
        cpus: number of CPUs that Ray counts for each rank, below 1 or whole.
        port_range: as in `LaunchSettings`, also for the port to which this machine connects.
    """

    kind: Literal["ray"]
    address: str | None = None
    cpus: PositiveFloat = 1.0
    port_range: _Ports = None

    @field_validator("cpus")
    @classmethod
    def _check_cpus(cls, cpus: float) -> float:
        if cpus > 1 and cpus % 1:
            raise ValueError(f"got {cpus:g}; Ray allows fractions below 1, or whole numbers")
        return cpus

    @contextmanager
    def open(self, cluster: ClusterSpec | None) -> Iterator[Launch]:
        """The launch, open while the block runs; see `LaunchSettings.open`."""
        if cluster is None:
            raise DocumentError(needs_cluster(self.kind))
        with (
            listening_within(self.port_range),
            connected(self.address) as ray,
            closing(RayLaunch(ray, cluster, self.cpus)) as launch,
        ):
            yield launch


def needs_cluster(kind: str) -> str:
    """The message for a missing cluster with a launch that needs one."""
    example = "fat_node_star" if kind == "emulated" else "FILE (a cluster with an address for every node)"
    return f"cluster: missing; launch={kind} needs one, for example cluster={example}"


class ClusterSettings(Configuration):
    """The keys of a verb that define its cluster.

    Attributes:
        launch: where the ranks run; each verb says which kinds it allows.
        cluster: cluster document; None is one machine.
        cluster_scale: factor on every rate of the cluster.
        cluster_fastest: bytes/s of the fastest link, to which all rates are scaled in proportion, instead of
            ``cluster_scale``. Bench and tune refuse both keys together.
        rank_order: ``natural`` keeps the cluster's order of ranks; ``interleaved`` alternates between the first and the
            second half of the nodes, the worst order for two racks.
    """

    launch: LaunchSettings | TorchrunSettings | SlurmSettings | RaySettings = LaunchSettings()
    cluster: dict[str, Any] | None = None
    cluster_scale: PositiveFloat = 1.0
    cluster_fastest: Rate | None = None
    rank_order: Literal["natural", "interleaved"] = "natural"

    @property
    def emulated(self) -> bool:
        """Whether the links between ranks are emulated."""
        return self.launch.kind == "emulated"

    def _check_cluster(self) -> None:
        """Refuse keys that need a cluster; for the subclasses, after their check of what the launch needs."""
        changed = self.cluster_scale != 1.0 or self.cluster_fastest is not None or self.rank_order != "natural"
        if self.cluster is None and changed:
            raise ValueError("cluster: missing; cluster_scale, cluster_fastest and rank_order need a cluster")


def _kind(value: Any) -> str:
    return str(value.get("kind", "local") if isinstance(value, dict) else getattr(value, "kind", value))


def _by_kind(*kinds: str, remark: str = "") -> Discriminator:
    """Chooses a class by its field ``kind``, so that messages are about fields of that class only."""
    return Discriminator(_kind, "launch_kind", f"no launch of this subcommand; allowed: {', '.join(kinds)}{remark}")


_Started = (
    Annotated[LaunchSettings, Tag("local")]
    | Annotated[LaunchSettings, Tag("emulated")]
    | Annotated[LaunchSettings, Tag("ssh")]
    | Annotated[SlurmSettings, Tag("slurm")]
)
_AT_ONCE = "; this subcommand starts its workers itself"

StartedLaunch = Annotated[
    _Started | Annotated[RaySettings, Tag("ray")],
    _by_kind("local", "emulated", "ssh", "slurm", "ray", remark=_AT_ONCE),
]
"""Launches of verbs that start their workers themselves."""

AnyLaunch = Annotated[
    _Started | Annotated[TorchrunSettings, Tag("torchrun")],
    _by_kind("local", "emulated", "ssh", "slurm", "torchrun"),
]
