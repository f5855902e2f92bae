"""How short a step can be at best when synchronization overlaps with the backward pass."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_autosync.cluster.bounds import synchronization_limit
from lightning_autosync.cluster.spec import ClusterSpec
from lightning_autosync.errors import ClusterError


def least_step_time(
    spec: ClusterSpec,
    gradients: Iterable[tuple[float, float]],
    forward: float = 0.0,
    backward: float = 0.0,
    optimizer: float = 0.0,
    framing: float = 1.0,
    burst: float = 0.0,
) -> float:
    """The least seconds of a synchronous step, whatever the plan.

    No byte of a gradient travels before some rank has it, and from any moment on the cluster synchronizes at most
    at the rate R of :func:`~lightning_autosync.cluster.bounds.synchronization_rate`. So if B(t) bytes become ready
    at t or later, they are not synchronized before ``forward + t + framing x B(t) / R``; the optimizer needs all of
    them and the end of backward. With the ready times t of the gradients, a step takes at least

        ``forward + max(backward, max over t of t + framing x B(t) / R) + optimizer``

    which is the makespan of one machine of rate R whose jobs have release dates; working them off in the order of
    release attains it. For gradients that are ready at once it is
    :func:`~lightning_autosync.cluster.bounds.synchronization_time`. Latencies and the filling of pipelines are left
    out.

    Where rested links let a burst pass at once, a channel carries ``bandwidth x seconds + burst`` from t on; what this
    saves on the channels that bind is taken off B(t) (see :class:`~lightning_autosync.cluster.Limit`), in every step,
    whether or not its links had a rest. Where nodes differ in speed, gradients are ready when the fastest node has them
    (its share could be summed early), passes and optimizer take as long as on the slowest node, and the last bytes may
    reach the fastest.

    Args:
        spec: the cluster.
        gradients: for each gradient the seconds from the start of backward at which it is ready, and its bytes.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        optimizer: seconds of the optimizer step.
        framing: bytes on the wire for each byte of payload; 1514 / 1448 with TCP/IP on Ethernet.
        burst: bytes that each direction of a link lets pass at once after a rest, as emulated links do; else none.

    Raises:
        ClusterError: the rates of the cluster are unknown, framing is below 1, or a time, size or burst is below 0.
    """
    latest_first = sorted(gradients, reverse=True)
    times = [forward, backward, optimizer, *(time for time, _ in latest_first), *(size for _, size in latest_first)]
    if framing < 1 or min(times) < 0 or burst < 0:
        raise ClusterError("times, sizes and burst: none may be below 0, and framing not below 1")
    limit = synchronization_limit(spec)
    slowest, fastest = min(node.speed for node in spec.nodes), max(node.speed for node in spec.nodes)
    least, remaining = (forward + backward + optimizer) / slowest, 0.0
    for ready, size in latest_first:
        remaining += size
        synchronizing = limit.seconds(framing * remaining, burst)
        least = max(least, (forward + ready + optimizer) / fastest + synchronizing)
    return least
