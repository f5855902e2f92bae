"""Parameter servers and workers that die or stop: the others go on, or end with a bounded, clear error."""

from __future__ import annotations

import time
from typing import Any

import pytest
from crew import KILL, STOP, Crew, draw_faults
from server_faults import HEARTBEAT
from test_mesh_faults import SLACK
from training import Net

from lightning_autosync.plan import Group, Partition, SyncPlan
from lightning_autosync.workload import describe

RELAXED: list[dict[str, Any]] = [{"mode": "bounded_staleness", "staleness": 2}, {"mode": "asynchronous"}]
WORKERS = 4
BOUND = HEARTBEAT.longest + HEARTBEAT.redial + SLACK


def plan_on(servers: list[int], only: int, consistency: dict[str, Any], aggregate: bool = False) -> SyncPlan:
    group = Group(
        name="all",
        variables=tuple(variable.name for variable in describe(Net()).variables),
        architecture="parameter_server",
        topology="star",
        partition=Partition(shards=len(servers)),
        placement=tuple(servers),
        local_aggregation=aggregate,
    )
    return SyncPlan(world_size=WORKERS, servers=only, consistency=consistency, groups=(group,))


def crew_for(plan: SyncPlan, seconds: float, nodes: list[list[int]] | None = None) -> Crew:
    size = plan.world_size + plan.servers
    return Crew("server_faults:train", size, plan=plan.to_dict(), seconds=seconds, nodes=nodes)


def check_survivors(found: dict[int, Any], workers: list[int]) -> None:
    """They ended without an error, alike, and went on for about all the time."""
    assert {rank: found[rank]["error"] for rank in workers} == dict.fromkeys(workers, "")
    assert len({found[rank]["digest"] for rank in workers}) == 1
    assert all(found[rank]["finite"] for rank in workers)


@pytest.mark.parametrize(
    ("how", "consistency", "seconds"),
    [("kill", RELAXED[0], 6.0), pytest.param("stop", RELAXED[1], 12.0, marks=pytest.mark.slow)],
)
def test_the_others_go_on_without_a_lost_worker(how: str, consistency: dict[str, Any], seconds: float) -> None:
    with crew_for(plan_on([0, 4], 1, consistency), seconds) as crew:
        crew.wait_for("steps3", 5)
        getattr(crew, how)(3)
        before = crew._store.add("steps0", 0)
        found = {rank: crew.result(rank, 60.0) for rank in (0, 1, 2, 4)}
    check_survivors(found, [0, 1, 2])
    assert found[0]["steps"] > before + 20
    assert found[4] == {"ended": True, "failure": ""}


@pytest.mark.slow
def test_a_lost_worker_comes_back() -> None:
    with crew_for(plan_on([0, 4], 1, RELAXED[0]), seconds=14.0) as crew:
        crew.wait_for("steps3", 5)
        crew.kill(3)
        steps = crew._store.add("steps3", 0)
        crew.start(3, rejoin=True)
        crew.wait_for("steps3", steps + 10)
        found = crew.results(60.0)
    check_survivors(found, [0, 1, 2])
    assert found[3]["steps"] >= 10


def test_a_server_that_lost_all_its_workers_has_failed() -> None:
    with crew_for(plan_on([0, 4], 1, {"mode": "asynchronous"}), seconds=60.0) as crew:
        crew.wait_for("steps3", 5)
        for rank in range(WORKERS):
            crew.kill(rank)
        found = crew.result(4, BOUND)
    assert found["ended"]
    assert "and no worker is left" in found["failure"]


def test_a_server_whose_first_worker_dies_before_it_is_told_what_to_keep_has_failed() -> None:
    with Crew("server_faults:await_setup", 2) as crew:
        crew.wait_for("joined", 1)
        crew.kill(0)
        found = crew.result(1, BOUND)
    assert found["ended"]
    assert found["failure"].startswith("rank 0 is lost")


@pytest.mark.slow
def test_synchronous_workers_end_when_one_is_lost() -> None:
    with crew_for(plan_on([0, 4], 1, {"mode": "synchronous"}), seconds=60.0) as crew:
        crew.wait_for("steps3", 5)
        crew.kill(3)
        killed = time.time()
        found = {rank: crew.result(rank, 60.0) for rank in (0, 1, 2)}
    for seen in found.values():
        assert "rank 3 is lost" in seen["error"]
        assert "synchronous steps need every worker" in seen["error"]
        assert seen["at"] - killed < BOUND
        assert seen["finite"]


@pytest.mark.parametrize(
    ("how", "consistency"),
    [("kill", {"mode": "synchronous"}), pytest.param("stop", RELAXED[0], marks=pytest.mark.slow)],
)
def test_a_dead_server_is_named_by_every_worker(how: str, consistency: dict[str, Any]) -> None:
    with crew_for(plan_on([0, 4], 1, consistency), seconds=60.0) as crew:
        crew.wait_for("steps3", 5)
        getattr(crew, how)(4)
        killed = time.time()
        found = {rank: crew.result(rank, 60.0) for rank in range(WORKERS)}
    for seen in found.values():
        # Workers close when they know; others may hear of that first if they serve too.
        assert "rank 4" in seen["error"] or "rank 0" in seen["error"]
        assert seen["at"] - killed < BOUND
    assert any("the parameter server on rank 4 is lost" in seen["error"] for seen in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 3])
def test_a_node_goes_on_without_its_leader_or_a_member(victim: int) -> None:
    plan = plan_on([0, 4], 1, RELAXED[0], aggregate=True)
    with crew_for(plan, seconds=8.0, nodes=[[0, 1], [2, 3]]) as crew:
        crew.wait_for(f"steps{victim}", 5)
        crew.kill(victim)
        left = [rank for rank in range(WORKERS) if rank != victim]
        found = {rank: crew.result(rank, 60.0) for rank in left}
    check_survivors(found, left)
    survivor = 5 - victim
    assert found[survivor]["steps"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_faults_leave_the_others_with_one_model(seed: int) -> None:
    consistency = RELAXED[seed % len(RELAXED)]
    with crew_for(plan_on([0, 4], 1, consistency), seconds=12.0) as crew:
        crew.wait_for("joined", WORKERS + 1)
        # One of them stays unhurt beside rank 0, or there would be no other model to compare with.
        faults = draw_faults(seed, [rank for rank in (1, 2, 3) if rank != 1 + seed % 3], 3, 4.0, kinds=(KILL, STOP))
        crew.inject(faults)
        hit = {fault.rank for fault in faults}
        unhurt = [rank for rank in range(WORKERS) if rank not in hit]
        assert len(unhurt) > 1
        found = {rank: crew.result(rank, 60.0) for rank in unhurt}
    check_survivors(found, unhurt)
