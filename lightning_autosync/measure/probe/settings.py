"""Settings of a probe (where the ranks run, how long to measure), and its result."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Configuration, Duration, Index, Result, seconds_text
from lightning_autosync.measure.launches.settings import AnyLaunch, LaunchSettings, needs_cluster


class ProbeSettings(Configuration):
    """One probe.

    Attributes:
        name: name of the cluster that is written.
        launch: ``local``, ``emulated``, ``ssh``, ``slurm`` or ``torchrun``.
        cluster: cluster to emulate; with ``ssh`` the nodes, of which only addresses and devices are used.
        cluster_scale: factor on every rate of the cluster.
        ranks: number of ranks on this machine with ``launch=local``.
        scheduling: the kernel's scheduling policy for the ranks, under which constants are measured.
        head: seconds at the beginning of each transfer that are not counted.
        window: seconds of each transfer that are counted.
        every_pair: whether to measure each pair of nodes alone, in both directions; None does so for up to four nodes.
        constants: whether to measure the constants of the hosts too.
        accelerated: whether the job computes its gradients on an accelerator, not on the core that packs them.
        timeout: maximum seconds of the probe; with ``launch=torchrun`` of each wait for other ranks.
    """

    name: str = "probed"
    launch: AnyLaunch = LaunchSettings()
    cluster: dict[str, Any] | None = None
    cluster_scale: PositiveFloat = 1.0
    ranks: PositiveInt = 2
    scheduling: Literal["none", "batch"] = "batch"
    head: PositiveFloat = 0.2
    window: PositiveFloat = 0.3
    every_pair: bool | None = None
    constants: bool = True
    accelerated: bool = False
    timeout: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _check(self) -> ProbeSettings:
        if self.launch.kind in ("emulated", "ssh"):
            if self.cluster is None:
                raise ValueError(needs_cluster(self.launch.kind))
        elif self.cluster is not None:
            raise ValueError(
                f"cluster: launch={self.launch.kind} measures the nodes that it runs on; remove this setting"
            )
        return self

    def emulated_cluster(self) -> ClusterSpec | None:
        """The cluster to emulate, scaled; None where nothing is emulated."""
        return self.named_cluster() if self.launch.kind == "emulated" else None

    def named_cluster(self) -> ClusterSpec | None:
        """The cluster on which the ranks are started; None without one."""
        if self.cluster is None:
            return None
        return ClusterSpec.from_dict(self.cluster, source="cluster").scaled(self.cluster_scale)


class ProbeDocument(Result):
    """``autosync-probe/1``: the result of a probe.

    Its parts are plain data, as `lightning_autosync.measure.probe.job.probe_ranks` returns them.

    Attributes:
        settings: settings of the probe.
        cluster: document of the measured cluster.
        nodes: bytes/s of each node up and down, alone and while all nodes send.
        own_trip: seconds of a round trip without a wire.
        pairs: rates and round trips of pairs of nodes.
        sharing: how well flows use the links that they share; None for one node.
        burst: bytes that pass a link at once after a pause; None if unknown.
        links: rate and latency of each direction of each link.
        constants: document of the hosts' constants; None if they were not measured.
        costs: measurements from which constants are fitted; None if they were not measured.
        transfers: number of transfers.
        seconds: seconds of the probe.
    """

    FORMAT: ClassVar[str] = "autosync-probe/1"

    settings: dict[str, Any]
    cluster: dict[str, Any]
    nodes: tuple[dict[str, Any], ...]
    own_trip: float
    pairs: tuple[dict[str, Any], ...]
    sharing: dict[str, float] | None
    burst: float | None
    links: tuple[dict[str, Any], ...]
    constants: dict[str, Any] | None
    costs: dict[str, Any] | None = None
    transfers: Index
    seconds: Duration

    def figures(self) -> dict[str, str]:
        counts = {"nodes": len(self.nodes), "links": len(self.links) // 2, "transfers": self.transfers}
        return {**{name: str(count) for name, count in counts.items()}, "probe": seconds_text(self.seconds)}
