"""Settings of a probe: where the ranks are, and how long to measure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.documents import Configuration
from lightning_autosync.measure.launches.settings import LaunchSettings, TorchrunSettings


class ProbeSettings(Configuration):
    """One probe.

    Attributes:
        name: of the cluster that is written.
        launch: ``local``, ``emulated``, ``ssh`` or ``torchrun``.
        cluster: what to emulate; with ``ssh`` the nodes, of which only addresses and devices count.
        cluster_scale: factor on every rate of it.
        ranks: how many there are on this machine with ``launch=local``.
        scheduling: the kernel's policy for the ranks; constants are those under it.
        head: seconds at the beginning of each transfer that do not count.
        window: seconds of each transfer that do.
        every_pair: each pair of nodes is measured alone, both ways; None does so for up to four nodes.
        constants: measure what the hosts cost, too.
        accelerated: the job computes its gradients on an accelerator and not on the core that packs them.
        timeout: seconds that the probe may take.
    """

    name: str = "probed"
    launch: LaunchSettings | TorchrunSettings = LaunchSettings()
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
                example = "fat_node_star" if self.launch.kind == "emulated" else "FILE, with an address of every node"
                raise ValueError(f"cluster: missing; launch={self.launch.kind} needs one, as in cluster={example}")
        elif self.cluster is not None:
            raise ValueError(f"cluster: what is there is measured with launch={self.launch.kind}; leave it out")
        return self

    def emulated_cluster(self) -> ClusterSpec | None:
        """The cluster to emulate, scaled; None where nothing is emulated."""
        return self.named_cluster() if self.launch.kind == "emulated" else None

    def named_cluster(self) -> ClusterSpec | None:
        """The cluster on which the ranks are started; None without one."""
        if self.cluster is None:
            return None
        return ClusterSpec.from_dict(self.cluster, source="cluster").scaled(self.cluster_scale)
