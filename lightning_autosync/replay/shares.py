"""The time of a step in which ranks of unequal speed compute unequal parts of each global batch (``batch_shares``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan.schedule import Schedule
from lightning_autosync.replay.balance import Line, balance
from lightning_autosync.replay.constants import Constants
from lightning_autosync.replay.overlap import overlapped_step_time
from lightning_autosync.workload import Workload

if TYPE_CHECKING:
    from lightning_autosync.replay.replay import Replay


@dataclass(frozen=True)
class MicroBatches:
    """How many micro-batches each rank computes.

    Attributes:
        counts: [ranks] number of micro-batches of each rank.
        samples: number of samples in each.
        adding: seconds in which a node of speed 1 adds the gradients of a micro-batch to those of the ones before.
        step_time: predicted seconds of a step.
    """

    counts: tuple[int, ...]
    samples: int
    adding: float
    step_time: float

    @property
    def told(self) -> str:
        """The counts and the assumptions, in words."""
        least, most = min(self.counts), max(self.counts)
        ranks = f"{least}" if least == most else f"{least} to {most}"
        return f"{ranks} of {sum(self.counts)} for each rank, {1e3 * self.adding:.3g} ms to add gradients of each"


def shared_step_time(
    schedule: Schedule, workload: Workload, cluster: ClusterSpec, constants: Constants, overlaps: bool = False
) -> float | None:
    """Step time with batch shares in proportion to speeds; None if all ranks are equally fast.

    All ranks then compute for the same time, as if each had the mean speed. The optimizer's step is not shared out.

    Args:
        schedule: the messages.
        workload: the workload, whose times are those of a node of speed 1.
        overlaps: whether the job has ``overlap="step"``.
    """
    speeds = [cluster.nodes[node].speed for node in cluster.rank_nodes]
    mean = math.fsum(speeds) / len(speeds)
    if min(speeds) == max(speeds):
        return None
    later = workload.model_copy(update={"optimizer_time": workload.optimizer_time * mean / min(speeds)})
    replay = _replay(later, cluster, mean, constants)
    return overlapped_step_time(schedule, later, replay) if overlaps else replay.predict(schedule).step_time


def micro_batched(
    schedule: Schedule,
    workload: Workload,
    cluster: ClusterSpec,
    constants: Constants,
    batch_size: int,
    micro_batch: int,
) -> MicroBatches:
    """The step with ``batch_shares="auto"`` and a ``micro_batch``: shares are whole numbers of micro-batches.

    Ranks compute for unequal times, because shares are rounded; the prediction lets all begin to synchronize with the
    slowest one. Gradients are synchronized in the backward pass of the last micro-batch only, without overlap. A
    micro-batch is taken to cost as much for each sample as the whole batch does. Besides, its gradients are added to
    those of the ones before.

    Args:
        schedule: the messages.
        workload: the workload, whose times are those of ``batch_size`` samples on a node of speed 1.
        batch_size: number of samples in a batch of the data loader; the global batch has so many for each rank.
        micro_batch: number of samples in a micro-batch.

    Raises:
        DocumentError: the global batch has no whole number of micro-batches, or fewer than ranks.
    """
    speeds = [cluster.nodes[node].speed for node in cluster.rank_nodes]
    total, rest = divmod(batch_size * len(speeds), micro_batch)
    if rest or total < len(speeds):
        raise DocumentError(
            f"micro_batch: a global batch of {batch_size * len(speeds)} samples (batch_size times {len(speeds)} ranks) "
            f"needs a whole number of micro-batches, and at least one for each rank; {micro_batch} samples do not fit"
        )
    part, adding = micro_batch / batch_size, workload.bytes / constants.reduce_rate
    each = part * (workload.forward_time + workload.backward_time) + adding
    counts = balance([Line(0.0, (each or 1.0) / speed) for speed in speeds], total, [math.inf] * len(speeds))
    times = [count * each / speed for count, speed in zip(counts, speeds, strict=True)]
    slowest = max(range(len(speeds)), key=lambda rank: (times[rank], -speeds[rank]))
    backward = part * workload.backward_time / speeds[slowest]
    later = workload.model_copy(
        update={
            "forward_time": times[slowest] - backward,
            "backward_time": backward,
            "optimizer_time": workload.optimizer_time / min(speeds),
            "variables": tuple(
                variable
                if variable.ready is None
                else variable.model_copy(update={"ready": variable.ready * part / speeds[slowest]})
                for variable in workload.variables
            ),
        }
    )
    seconds = _replay(later, cluster, 1.0, constants).predict(schedule).step_time
    return MicroBatches(tuple(counts), micro_batch, adding, seconds)


def _replay(workload: Workload, cluster: ClusterSpec, speed: float, constants: Constants) -> Replay:
    """A replay in which all nodes have one speed."""
    # Late: it needs numba, and training imports this package without it.
    from lightning_autosync.replay.replay import Replay

    nodes = tuple(node.model_copy(update={"speed": speed}) for node in cluster.nodes)
    return Replay(workload, cluster.model_copy(update={"nodes": nodes}), constants)
