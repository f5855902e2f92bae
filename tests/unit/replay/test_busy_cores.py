"""Computation that keeps the cores busy which also move messages."""

from __future__ import annotations

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import SyncPlan, builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.replay import Detail
from lightning_autosync.workload import Variable, Workload, catalogue
from lightning_autosync.workload.scaling import scaled, with_compute

FORWARD, BACKWARD, LAYERS = 0.02, 0.045, 30
WORKLOAD = Workload(
    name="layers",
    variables=tuple(
        Variable(name=f"layer{place}", shape=(384, 384), ready=BACKWARD * (LAYERS - place) / LAYERS)
        for place in range(LAYERS)
    ),
    forward_time=FORWARD,
    backward_time=BACKWARD,
)
MIB = 2**20


def step_time(gbit: float, mib: int, constants: Constants, detail: Detail = "frames") -> float:
    """Seconds of a step of four ranks with native messages of ``mib`` MiB, on links of ``gbit`` Gbit/s."""
    cluster = ClusterSpec.uniform(nodes=4, bandwidth=f"{gbit} Gbit/s", name="equal")
    plan: SyncPlan = builders.build(
        "all_reduce", WORKLOAD, cluster, bucket_bytes=mib * MIB, first_bucket_bytes=mib * MIB
    )
    return Replay(WORKLOAD, cluster, constants).predict(compile_plan(plan, WORKLOAD, cluster), detail).step_time


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_on_fast_links_messages_beside_computation_gain_nothing_where_cores_are_busy(detail: Detail) -> None:
    """Moving 17.7 MB at 8 Gbit/s takes cores, not links. What moves them meanwhile keeps the others from computing."""
    small, large = (step_time(8, mib, Constants(cores=2), detail) for mib in (1, 100))
    assert small > large
    computing_elsewhere = Constants(cores=2, accelerated=True)
    assert step_time(8, 1, computing_elsewhere, detail) < 0.8 * step_time(8, 100, computing_elsewhere, detail)


def test_on_slow_links_messages_beside_computation_gain_although_cores_are_busy() -> None:
    small, large = (step_time(1, mib, Constants(cores=2)) for mib in (1, 100))
    assert large - small == pytest.approx(BACKWARD, rel=0.15)


def test_computation_that_takes_no_core_costs_nothing() -> None:
    """A job measures what its computation takes; paced computation sleeps."""
    asleep = Constants(cores=2, computing=0.0)
    assert step_time(8, 1, asleep) < 0.8 * step_time(8, 1, Constants(cores=2))
    assert step_time(8, 1, asleep) == pytest.approx(step_time(8, 1, Constants(cores=2, accelerated=True)), rel=0.02)
    # Four ranks share two cores, so each has half a core, unless the job has measured something else.
    assert step_time(8, 1, Constants(cores=2)) == step_time(8, 1, Constants(cores=2, computing=0.5))


@pytest.mark.parametrize("gbit", [0.2, 1, 8])
@pytest.mark.parametrize("mib", [1, 5, 100])
def test_fluids_agree_with_frames(gbit: float, mib: int) -> None:
    constants = Constants(cores=2)
    assert step_time(gbit, mib, constants, "fluid") == pytest.approx(step_time(gbit, mib, constants), rel=0.02)


def test_ranks_with_cores_of_their_own_are_not_affected() -> None:
    assert step_time(8, 1, Constants()) == step_time(8, 1, Constants(computing=0.1))


@pytest.mark.parametrize("detail", ["frames", "fluid"])
def test_messages_move_beside_a_backward_pass_of_many_gradients(detail: Detail) -> None:
    """364 gradients keep two cores busy, but not links. Rings of 0.25 MB took 57 ms there, and of 1.25 MB 63 ms."""
    work = with_compute(scaled(catalogue.build("densenet121", flops_per_second=1e12, batch_size=32), 0.042), 0.02)
    cluster = ClusterSpec.uniform(nodes=4, bandwidth="400 Mbit/s", name="equal")
    replay = Replay(work, cluster, Constants(cores=2, accelerated=True, gradient_cost=18e-6, burst=2**17))

    def predicted(size: int) -> float:
        plan = builders.build("all_reduce", work, cluster, topology="ring", bucket_bytes=size, first_bucket_bytes=size)
        return replay.predict(compile_plan(plan, work, cluster), detail).step_time

    assert predicted(250_000) < 0.93 * predicted(1_250_000)
