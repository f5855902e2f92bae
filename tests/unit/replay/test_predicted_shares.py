"""The predicted step of ranks that compute unequal parts of global batches, worked out by hand."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.shares import MicroBatches, micro_batched, shared_step_time
from lightning_autosync.workload import Variable, Workload

# 8 kB on links of 1 GB/s: synchronization takes next to no time.
WORKLOAD = Workload(
    name="two",
    variables=(Variable(name="first", shape=(1000,), ready=0.2), Variable(name="last", shape=(1000,), ready=0.1)),
    forward_time=0.1,
    backward_time=0.2,
    optimizer_time=0.04,
)
EQUAL = ClusterSpec.uniform(4, bandwidth=1e9)


def with_speeds(*speeds: float, cluster: ClusterSpec = EQUAL) -> ClusterSpec:
    pairs = zip(cluster.nodes, speeds, strict=True)
    return cluster.model_copy(
        update={"nodes": tuple(node.model_copy(update={"speed": speed}) for node, speed in pairs)}
    )


def predicted(cluster: ClusterSpec, batch_size: int, micro_batch: int, workload: Workload = WORKLOAD) -> MicroBatches:
    schedule = compile_plan(builders.all_reduce(workload, cluster), workload, cluster)
    return micro_batched(schedule, workload, cluster, Constants(), batch_size, micro_batch)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("speeds", "seconds"),
    [
        ((1, 1, 1, 1), None),
        ((0.25, 1, 1, 1), 0.3 * 4 / 3.25 + 0.04 / 0.25),  # the slowest rank makes its whole step of the optimizer
        ((2, 1, 4, 1), 0.3 / 2 + 0.04),
    ],
)
def test_ranks_compute_as_long_as_one_of_mean_speed(
    speeds: tuple[float, ...], seconds: float | None, overlaps: bool
) -> None:
    cluster = with_speeds(*speeds)
    schedule = compile_plan(builders.all_reduce(WORKLOAD, cluster), WORKLOAD, cluster)
    found = shared_step_time(schedule, WORKLOAD, cluster, Constants(), overlaps)
    assert found == (seconds and pytest.approx(seconds, rel=0.01))


@pytest.mark.parametrize(
    ("overlaps", "waits", "seconds"),
    [
        (False, False, 2.0 + 0.25),
        (True, True, 2.0 + 0.25),
        (True, False, 1.0 + 0.25 + 0.25 + 0.25 + 0.25),  # the last layer waits for a quarter of a second
    ],
)
def test_with_overlap_the_next_forward_pass_hides_messages(overlaps: bool, waits: bool, seconds: float) -> None:
    """Passes of 0.5 and 1 s. A gradient of 1 s on the wire is ready after 1 s, that of the first layer after 1.5 s."""
    workload = WORKLOAD.model_copy(
        update={
            "variables": (
                Variable(name="first", shape=(1,), ready=2.0),
                Variable(name="last", shape=(25_000_000,), ready=1.0),
            ),
            "forward_time": 1.0,
            "backward_time": 2.0,
            "optimizer_time": 0.25,
        }
    )
    cluster = with_speeds(1, 3, cluster=ClusterSpec.uniform(2, bandwidth=1e8))
    plan = builders.all_reduce(workload, cluster, topology="tree", bucket_bytes=1).model_copy(update={"waits": waits})
    schedule = compile_plan(plan, workload, cluster)
    found = shared_step_time(schedule, workload, cluster, Constants.ideal(), overlaps)
    assert found == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("speeds", "micro_batch", "counts", "seconds"),
    [
        ((1, 1, 1, 1), 16, (2, 2, 2, 2), 0.3 + 0.04),
        ((0.25, 1, 1, 1), 16, (1, 2, 2, 3), 0.15 * 4 + 0.16),  # the slow rank has no less than one micro-batch
        ((0.25, 1, 1, 1), 4, (2, 10, 10, 10), 10 * 0.3 / 8 + 0.16),
        ((0.5, 1, 1, 1), 32, (1, 1, 1, 1), 0.6 + 0.08),
    ],
)
def test_shares_are_whole_numbers_of_micro_batches(
    speeds: tuple[float, ...], micro_batch: int, counts: tuple[int, ...], seconds: float
) -> None:
    found = predicted(with_speeds(*speeds), 32, micro_batch)
    assert sorted(found.counts) == sorted(counts)
    assert found.counts[0] == counts[0]
    assert found.step_time == pytest.approx(seconds, rel=0.01)
    assert f"of {sum(counts)} for each rank" in found.told


def test_only_the_last_micro_batch_hides_the_synchronization() -> None:
    """25 MB take 37.5 ms with four ranks: beside a whole backward pass, most of it is hidden."""
    large = WORKLOAD.model_copy(
        update={
            "variables": tuple(
                Variable(name=f"v{n}", shape=(625_000,), ready=0.02 * (n + 1)) for n in reversed(range(10))
            )
        }
    )
    schedule = compile_plan(builders.all_reduce(large, EQUAL, bucket_bytes=1), large, EQUAL)
    whole = Replay(large, EQUAL).predict(schedule).step_time
    found = micro_batched(schedule, large, EQUAL, Constants(), 32, 4)
    adding = 8 * large.bytes / Constants().reduce_rate
    assert found.adding == pytest.approx(large.bytes / Constants().reduce_rate)
    assert found.step_time > whole + adding + 0.005


def test_a_global_batch_has_a_whole_number_of_micro_batches_for_each_rank() -> None:
    for micro_batch in (48, 64):
        with pytest.raises(DocumentError, match=rf"^micro_batch: a global batch of 128 samples .*; {micro_batch} samp"):
            predicted(EQUAL, 32, micro_batch)
