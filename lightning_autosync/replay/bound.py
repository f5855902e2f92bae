"""The least step time of a workload on a cluster, whatever its exact plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_autosync.cluster import ClusterSpec, Node, least_step_time, synchronization_limit
from lightning_autosync.replay.compute import ready_times
from lightning_autosync.workload import Variable, Workload


@dataclass(frozen=True)
class Bound:
    """A least time.

    Attributes:
        seconds: the bound on a step.
        compute: the seconds of computation in a step, of the slowest node.
        meaning: which bound it is, for a reader.
        exact: whether the rate of synchronization in it can be reached; else it is a cut bound, of a cluster too large
            for more.
    """

    seconds: float
    compute: float
    meaning: str
    exact: bool = True


def least_step(workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0) -> Bound:
    """The bound on a step, in which synchronization overlaps with backward and ends before the next forward.

    Beside `step_bound`, all rows that others touched must arrive.

    Args:
        workload: its tables ``row_sparse``; without times, computation takes none.
        cluster: with known rates.
        framing: bytes on the wire for each byte of payload.
        burst: bytes that each direction of a link lets pass at once after a rest.

    Raises:
        ClusterError: the rates of the cluster are unknown.
    """
    fastest = max(node.speed for node in cluster.nodes)
    arrivals = (
        workload.forward_time / fastest + seconds + workload.optimizer_time / node.speed
        for node, seconds in arrival_times(workload, cluster, framing, burst)
    )
    seconds = max(step_bound(workload, cluster, framing, burst), *arrivals)
    passes = workload.forward_time + workload.backward_time
    compute = (passes + workload.optimizer_time) / min(node.speed for node in cluster.nodes)
    exact = synchronization_limit(cluster).exact
    return Bound(seconds, compute, _meaning(passes > 0, framing > 1, burst > 0, exact), exact)


def _meaning(computes: bool, framed: bool, burst: bool, exact: bool) -> str:
    notes = {"framing included": framed, "the burst of rested links taken off": burst, "a cut bound": not exact}
    told = ", ".join(note for note, holds in notes.items() if holds)
    synchronization = f"synchronization ({told})" if told else "synchronization"
    return f"forward, then backward and {synchronization} side by side" if computes else f"{synchronization} alone"


def step_bound(workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0) -> float:
    """The least seconds of a step; :func:`~lightning_autosync.cluster.bounds.least_step_time` derives it.

    Ready times that are unknown are those that the replay assumes. Of a table only the touched rows count, as if all
    ranks touched the same ones. Arguments and errors are those of `least_step`.
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
    """The least seconds to synchronize all gradients, were they ready at once; arguments as of `least_step`."""
    return synchronization_limit(cluster).seconds(framing * sum(map(changed_bytes, workload.variables)), burst)


def changed_bytes(variable: Variable) -> float:
    """Bytes of a dense gradient, or of the rows that one rank touches."""
    return variable.bytes if variable.rows is None else variable.rows / variable.shape[0] * variable.bytes


def arrival_times(
    workload: Workload, cluster: ClusterSpec, framing: float = 1.0, burst: float = 0.0
) -> Iterator[tuple[Node, float]]:
    """For each node, the least seconds until all that its ranks need of the others has come in.

    These are the dense gradients and every row that one of the others touched, if each draws its rows evenly from all.
    """
    for node in cluster.nodes:
        others = cluster.world_size - node.devices
        needed = sum(variable.bytes * _share(variable, others) for variable in workload.variables) if others else 0.0
        rates = list(_rates_in(cluster, node.name))
        left = max(0.0, framing * needed - burst * len(rates))
        yield node, left / sum(rates) if left else 0.0


def _rates_in(cluster: ClusterSpec, name: str) -> Iterator[float]:
    """Bytes/s into a node, for each of its links."""
    for link in cluster.links:
        rate = link.bandwidth if link.b == name else link.reverse_bandwidth if link.a == name else None
        if rate is not None:
            yield rate


def _share(variable: Variable, ranks: int) -> float:
    """The share of a variable's bytes that at least one of ``ranks`` ranks changed; 1 for a dense one."""
    if variable.rows is None:
        return 1.0
    return 1.0 - (1.0 - variable.rows / variable.shape[0]) ** ranks
