"""Workers of partial reduce and periodic averaging that die, stop and come back: the others go on and end equal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from averaging_faults import HEARTBEAT
from crew import KILL, STOP, Crew, draw_faults
from test_mesh_faults import SLACK

SIZE = 4
PAUSES = [0.016, 0.008, 0.032, 0.008]
"""Seconds between steps, so that other tests have some of the cores."""
WAYS: dict[str, dict[str, Any]] = {
    "partial reduce": {"mode": "partial_reduce", "group_size": 2, "weighting": "dynamic"},
    "diloco": {"mode": "periodic", "period": 5, "outer": "diloco"},
    "slowmo by fragments": {"mode": "periodic", "period": 4, "outer": "slowmo", "fragments": 2},
}
BOUND = HEARTBEAT.longest + HEARTBEAT.redial + SLACK


def cases(quick: set[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """All combinations; those that are not ``quick`` are for `make test-all`, for each starts its own processes."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in product(*axes)]


def crew_for(settings: dict[str, Any]) -> Crew:
    return Crew("averaging_faults:train", SIZE, settings=settings, pauses=PAUSES)


def steps_of(crew: Crew, rank: int) -> int:
    return crew._store.add(f"steps{rank}", 0)


def check_survivors(found: dict[int, Any], ranks: set[int]) -> None:
    assert set(found) == ranks
    assert {rank: seen["error"] for rank, seen in found.items()} == dict.fromkeys(ranks, "")
    assert len({seen["digest"] for seen in found.values()}) == 1
    assert all(seen["finite"] for seen in found.values())


@pytest.mark.parametrize(("way", "how"), cases({("partial reduce", "kill")}, WAYS, ["kill", "stop"]))
def test_the_others_go_on_without_a_lost_worker(way: str, how: str) -> None:
    with crew_for(WAYS[way]) as crew:
        crew.wait_for("steps3", 6)
        getattr(crew, how)(3)
        crew.wait_for("steps0", steps_of(crew, 0) + 30, timeout=60.0)
        crew.announce("finish")
        found = {rank: crew.result(rank, 40.0) for rank in range(3)}
    check_survivors(found, {0, 1, 2})
    assert all(seen["slowest"] < BOUND for seen in found.values())


@pytest.mark.parametrize("way", cases({("partial reduce",)}, WAYS))
def test_a_killed_worker_comes_back_to_the_common_model(way: str) -> None:
    with crew_for(WAYS[way]) as crew:
        crew.wait_for("steps2", 6)
        crew.kill(2)
        crew.wait_for("steps0", steps_of(crew, 0) + 10, timeout=60.0)
        before = steps_of(crew, 2)
        crew.start(2, rejoin=True)
        crew.wait_for("steps2", before + 10, timeout=60.0)
        crew.announce("finish")
        found = crew.results(40.0)
    check_survivors(found, set(range(SIZE)))
    assert found[2]["came_back"] == 1
    assert len({seen["progress"] for seen in found.values()}) == 1


@pytest.mark.parametrize("way", cases({("partial reduce",)}, ["partial reduce", "diloco"]))
def test_without_the_coordinator_all_end_with_a_clear_error(way: str) -> None:
    with crew_for(WAYS[way]) as crew:
        crew.wait_for("steps3", 6)
        killed = time.monotonic()
        crew.kill(0)
        found = crew.results(30.0)
        assert time.monotonic() - killed < BOUND
    assert set(found) == {1, 2, 3}
    assert all("rank 0 is lost" in seen["error"] and seen["finite"] for seen in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [0, 1])
def test_survivors_of_random_faults_end_equal(way: str, seed: int) -> None:
    faults = draw_faults(seed, ranks=(1, 2, 3), count=3, span=3.0, kinds=(KILL, STOP), stops=(0.1, 9.0))
    dead = {fault.rank for fault in faults if fault.kind == KILL}
    with crew_for(WAYS[way]) as crew:
        for rank in range(SIZE):
            crew.wait_for(f"steps{rank}", 1)
        crew.inject(faults)
        # Those that were stopped for too long come back in this time.
        time.sleep(HEARTBEAT.longest + 2.0)
        crew.announce("finish")
        found = crew.results(60.0)
    check_survivors(found, set(range(SIZE)) - dead)
