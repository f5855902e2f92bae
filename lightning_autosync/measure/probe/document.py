"""``autosync-probe/1``: the result document of a probe."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_autosync.documents import Duration, Index, Result


class ProbeDocument(Result):
    """One probe. Its parts are plain data, as `lightning_autosync.measure.probe.job.probe_ranks` returns them.

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
