"""How fast the replay prices plans: ``python tests/benchmarks/replay_speed.py``.

Prints what was reached beside the goals; ends with 1 where one is missed. Seconds are those of one core, so that other
load counts for little. Each setting of the hosts is timed three times, and the best counts.
"""

from __future__ import annotations

import os
import sys
import time
from random import Random

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.plan import Group, Partition, Schedule, SyncPlan, builders, compile_plan
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.workload import Variable, Workload

PLANS_A_SECOND, LARGE_SECONDS = 300.0, 2.0
SCHEDULES, MESSAGES = 20, 20
TOPOLOGIES = ("native", "ring", "tree", "star", "hierarchical", "packed")
MANY = Workload(
    name="many",
    variables=tuple(Variable(name=f"p{index}", shape=(300_000 + 40_000 * index,)) for index in range(MESSAGES)),
    forward_time=0.05,
    backward_time=0.1,
)
EIGHT = ClusterSpec.racks(racks=2, nodes_per_rack=4, bandwidth=50e6, uplink=25e6)
LARGE = ClusterSpec.racks(racks=32, nodes_per_rack=32, bandwidth=50e6, uplink=250e6)
HOSTS = {
    "hosts of their own": Constants(),
    "two shared cores": Constants(cores=2),
    "two shared cores, emulated links": Constants(cores=2, burst=128 * 1024, accelerated=True),
}


def drawn(seed: int, cluster: ClusterSpec) -> Schedule:
    """Every variable by itself, in a way of its own."""
    random = Random(seed)
    ranks = cluster.world_size
    groups = []
    for name in MANY.ready_order:
        topology, shards = random.choice(TOPOLOGIES), random.randint(1, ranks)
        partition = Partition(shards=shards) if shards > 1 else None
        groups.append(
            Group(
                name=name,
                variables=(name,),
                topology=topology,
                partition=partition,
                priority=random.choice((-1, 0, 1)),
            )
        )
    plan = SyncPlan(workload=MANY.variables_fingerprint, world_size=ranks, groups=tuple(groups))
    return compile_plan(plan, MANY, cluster)


def small() -> bool:
    """Twenty different schedules of twenty messages for eight ranks, each priced once and then once more."""
    schedules = [drawn(seed, EIGHT) for seed in range(SCHEDULES)]
    other = drawn(SCHEDULES, EIGHT)
    enough = True
    for name, constants in HOSTS.items():
        Replay(MANY, EIGHT, constants).predict(other)  # compiles
        replay = Replay(MANY, EIGHT, constants)
        rates = []
        for _ in range(2):
            begun = time.thread_time()
            for schedule in schedules:
                replay.predict(schedule)
            rates.append(len(schedules) / (time.thread_time() - begun))
        print(f"8 ranks, 20 messages, {name}: {rates[0]:.0f} plans/s at first sight, {rates[1]:.0f} again")
        enough = enough and (constants != Constants() or rates[0] >= PLANS_A_SECOND)
    print(f"goal, for hosts of their own: {PLANS_A_SECOND:.0f} plans/s at first sight")
    return enough


def large() -> bool:
    """A model for 1,024 ranks in DDP's buckets and in one message a variable; the cluster's routes still unknown."""
    seconds = []
    for bucket_bytes in (25 * 2**20, 1):
        schedule = compile_plan(builders.byteps(MANY, LARGE, topology="native", bucket_bytes=bucket_bytes), MANY, LARGE)
        replay = None
        for _ in range(2):
            begun = time.thread_time()
            replay = replay or Replay(MANY, LARGE)
            replay.predict(schedule)
            seconds.append(time.thread_time() - begun)
        print(f"1,024 ranks, {len(schedule.messages)} messages: {seconds[-2]:.2f} s at first, then {seconds[-1]:.2f} s")
    print(f"goal, for buckets: {LARGE_SECONDS:g} s at first")
    return seconds[0] <= LARGE_SECONDS


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return 0 if all([small(), large()]) else 1


if __name__ == "__main__":
    sys.exit(main())
