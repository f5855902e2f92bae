"""Lower bounds on the step time of a workload on a cluster, valid for every exact plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_autosync.cluster import (
    ClusterSpec,
    Node,
    binding_channels,
    least_step_time,
    synchronization_limit,
)
from lightning_autosync.replay.compute import ready_times
from lightning_autosync.workload import Variable, Workload


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step time.

    Attributes:
        seconds: lower bound on the step time.
        compute: seconds of computation in a step on the slowest node.
        meaning: description of the bound for reports.
        exact: True if the synchronization rate behind the bound can be reached; False for a cut bound, which is used
            where the cluster is too large to compute that rate (see `synchronization_limit`).
        binding: share of each channel in the bound on the rate of synchronization, by "source > target", the largest
            first (`binding_channels`); empty for one rank.
    """

    seconds: float
    compute: float
    meaning: str
    exact: bool = True
    binding: dict[str, float] = field(default_factory=dict)

    def binding_lines(self, most: int) -> list[str]:
        """The ``most`` largest of ``binding``, each as text, and how many more there are."""
        lines = [f"{name} ({share:.0%})" for name, share in list(self.binding.items())[:most]]
        return [*lines, f"{left} more"] if (left := len(self.binding) - most) > 0 else lines


def least_step(workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0) -> Bound:
    """Bound the step time: synchronization overlaps with backward and ends before the next forward.

    The bound is the largest of `step_bound`, the time until every node has received what others changed, and the time
    until every node has sent what its own ranks changed. It holds for sums along trees as for rows that travel once: in
    either way, every row that some rank touched reaches each node at least once.

    Args:
        workload: the workload, with its tables ``row_sparse``. If it has no times, computation takes no time.
        cluster: a cluster with known rates.
        framing: bytes on the wire for each byte of payload.
        burst: bytes that an idle link sends at once, for each direction.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    fastest = max(node.speed for node in cluster.nodes)
    begin = workload.forward_time / fastest
    arrivals = (
        begin + seconds + workload.optimizer_time / node.speed
        for node, seconds in arrival_times(workload, cluster, framing, burst)
    )
    departures = (
        begin + seconds + workload.optimizer_time / fastest
        for _, seconds in departure_times(workload, cluster, framing, burst)
    )
    seconds = max(step_bound(workload, cluster, framing, burst), *arrivals, *departures)
    passes = workload.forward_time + workload.backward_time
    compute = (passes + workload.optimizer_time) / min(node.speed for node in cluster.nodes)
    exact = synchronization_limit(cluster).exact
    meaning = _meaning(passes > 0, framing > 1, burst > 0, exact)
    return Bound(seconds, compute, meaning, exact, binding_channels(cluster))


def _meaning(computes: bool, framed: bool, burst: bool, exact: bool) -> str:
    notes = {"framing included": framed, "the burst of rested links taken off": burst, "a cut bound": not exact}
    told = ", ".join(note for note, holds in notes.items() if holds)
    synchronization = f"synchronization ({told})" if told else "synchronization"
    return f"forward, then backward and {synchronization} side by side" if computes else f"{synchronization} alone"


def step_bound(workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0) -> float:
    """Lower bound on a step in seconds; :func:`~lightning_autosync.cluster.bounds.least_step_time` derives it.

    Unknown ready times are assumed as in the replay. Only the touched rows of a table count, as if all ranks touched
    the same ones. Arguments and errors are those of `least_step`.
    """
    ready = ready_times(workload)
    return least_step_time(
        cluster,
        [(ready[variable.name], changed_bytes(variable)) for variable in workload.variables],
        workload.forward_time,
        workload.backward_time,
        workload.optimizer_time,
        framing,
        burst,
    )


def synchronization_bound(workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0) -> float:
    """Lower bound in seconds on synchronizing all gradients if all are ready at once; arguments as in `least_step`."""
    return synchronization_limit(cluster).seconds(framing * sum(map(changed_bytes, workload.variables)), burst)


def changed_bytes(variable: Variable) -> float:
    """Bytes of a dense gradient, or of the table rows that one rank touches."""
    return variable.touched_share * variable.bytes


def arrival_times(
    workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0
) -> Iterator[tuple[Node, float]]:
    """For each node, a lower bound on when it has received everything that its ranks need from other nodes.

    They need the dense gradients and every row that another rank touched. Rows that several others touched count once,
    as if they were summed on the way. No byte is sent before the fastest node has the gradient.

    Assumptions: each rank draws its rows uniformly and independently, the mean number of rows is that of every step,
    and indices of rows take no bytes. Where ranks prefer the same popular rows, fewer bytes may be enough.

    Yields:
        The node, and seconds from the start of the fastest node's backward pass.
    """
    for node in cluster.nodes:
        rates = [incoming for incoming, _ in _rates_of(cluster, node.name)]
        yield node, _transfer_time(workload, cluster, cluster.world_size - node.devices, rates, framing, burst)


def departure_times(
    workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0
) -> Iterator[tuple[Node, float]]:
    """Like `arrival_times`, when each node has sent what others need from it: sums, and rows that its ranks touched."""
    for node in cluster.nodes:
        rates = [outgoing for _, outgoing in _rates_of(cluster, node.name)]
        ranks = node.devices if node.devices < cluster.world_size else 0
        yield node, _transfer_time(workload, cluster, ranks, rates, framing, burst)


def _transfer_time(
    workload: Workload, cluster: ClusterSpec, ranks: int, rates: Sequence[float], framing: float, burst: float
) -> float:
    """Seconds until links with ``rates`` have carried what ``ranks`` ranks changed, none of it before it is ready."""
    if not ranks or not rates:
        return 0.0
    fastest = max(node.speed for node in cluster.nodes)
    ready = ready_times(workload)
    end = size = 0.0
    for variable in sorted(workload.variables, key=lambda variable: -ready[variable.name]):
        size += framing * variable.bytes * _share(variable, ranks)
        if size > burst * len(rates):
            end = max(end, ready[variable.name] / fastest + (size - burst * len(rates)) / sum(rates))
    return end


def _rates_of(cluster: ClusterSpec, name: str) -> Iterator[tuple[float, float]]:
    """Incoming and outgoing bytes/s of a node, for each of its links."""
    for link in cluster.links:
        rates = link.bandwidth, link.reverse_bandwidth
        if link.a != name:
            rates = rates[::-1]
        if name in (link.a, link.b) and rates[0] is not None and rates[1] is not None:
            yield rates[1], rates[0]


def _share(variable: Variable, ranks: int) -> float:
    """Expected share of a variable's bytes that at least one of ``ranks`` ranks changed; 1 for a dense variable."""
    return 1.0 - (1.0 - variable.touched_share) ** ranks
