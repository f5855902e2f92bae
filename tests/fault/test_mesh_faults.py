"""Meshes and group averages whose processes die, stop, or lose a connection."""

from __future__ import annotations

import time
from typing import Any

import pytest
from crew import DROP, KILL, STOP, Crew, Fault, draw_faults
from mesh_calls import QUICK

SLACK = 5.0
"""Seconds that a busy machine may need on top of every bound."""


def test_a_killed_peer_is_lost_at_once() -> None:
    with Crew("mesh_calls:watch", 3, peer=1, seconds=20.0) as crew:
        crew.wait_for("joined", 3)
        killed = time.time()
        crew.kill(1)
        found = crew.results(30.0)
    assert set(found) == {0, 2}
    for seen in found.values():
        assert seen["error"] == "PeerLost"
        assert seen["at"] - killed < QUICK.shortest
        assert seen["live"] == [0, 2]


@pytest.mark.slow
def test_a_stopped_peer_is_suspected_and_learns_that_it_was_given_up() -> None:
    with Crew("mesh_calls:watch", 3, peer=1, seconds=20.0) as crew:
        crew.wait_for("joined", 3)
        stopped = time.time()
        crew.stop(1)
        found = {rank: crew.result(rank, 30.0) for rank in (0, 2)}
        for seen in found.values():
            assert "silent" in seen["why"]
            assert 0.5 * QUICK.shortest < seen["at"] - stopped < QUICK.longest + QUICK.redial + SLACK
            assert seen["live"] == [0, 2]


@pytest.mark.slow
def test_a_peer_that_goes_on_after_suspicion_is_expelled() -> None:
    with Crew("mesh_calls:averages", 3, elements=10_000, timeout=5.0) as crew:
        crew.wait_for("joined", 3)
        crew.inject([Fault(STOP, 2, 0.5, seconds=QUICK.longest + 2 * QUICK.redial)])
        crew.wait_for("joined", 4)
        crew.announce("finish")
        found = crew.results(40.0)
    assert found[2]["rejoined"] == 1
    check_survivors(found, {0, 1, 2})


def test_a_short_pause_is_no_loss() -> None:
    with Crew("mesh_calls:averages", 3, elements=10_000, timeout=5.0) as crew:
        crew.wait_for("joined", 3)
        crew.inject([Fault(STOP, 1, 0.5, seconds=0.4 * QUICK.shortest)])
        crew.announce("finish")
        found = crew.results(40.0)
    assert all(seen["broken"] == 0 for seen in found.values())
    check_survivors(found, {0, 1, 2})


def test_no_message_is_lost_or_repeated_when_connections_drop() -> None:
    with Crew("mesh_calls:chatter", 3, messages=60, floats=500_000) as crew:
        crew.wait_for("talking", 3)
        for turn in range(6):
            crew.drop(turn % 3)
            # One re-dial at a time.
            time.sleep(0.3)
        found = crew.results(90.0)
    assert found == {rank: {"intact": True, "in_order": True} for rank in range(3)}


def test_a_killed_rank_comes_back() -> None:
    with Crew("mesh_calls:averages", 3, elements=10_000, timeout=5.0) as crew:
        crew.wait_for("joined", 3)
        crew.kill(1)
        time.sleep(0.5)
        crew.start(1, rejoin=True)
        crew.wait_for("joined", 4)
        crew.announce("finish")
        found = crew.results(40.0)
    assert found[1]["rejoined"] == 1
    check_survivors(found, {0, 1, 2})


def test_without_the_coordinator_all_end_with_an_error() -> None:
    with Crew("mesh_calls:averages", 3, elements=10_000, timeout=5.0) as crew:
        crew.wait_for("joined", 3)
        killed = time.monotonic()
        crew.kill(0)
        found = crew.results(20.0)
        assert time.monotonic() - killed < 2 * QUICK.longest + SLACK
    assert set(found) == {1, 2}
    assert all("rank 0 is lost" in seen["error"] and seen["finite"] for seen in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_survivors_of_random_faults_end_equal(seed: int) -> None:
    faults = draw_faults(seed, ranks=(1, 2, 3), count=3, span=3.0, kinds=(KILL, STOP, DROP))
    dead = {fault.rank for fault in faults if fault.kind == KILL}
    with Crew("mesh_calls:averages", 4, elements=300_000, timeout=5.0) as crew:
        crew.wait_for("joined", 4)
        crew.inject(faults)
        # Those that were stopped for too long come back in this time.
        time.sleep(QUICK.longest + 1.0)
        crew.announce("finish")
        found = crew.results(60.0)
    check_survivors(found, {0, 1, 2, 3} - dead)


def check_survivors(found: dict[int, Any], ranks: set[int]) -> None:
    """All survivors ended in bounded time with one valid model."""
    assert set(found) == ranks
    assert not [seen["error"] for seen in found.values() if "error" in seen]
    assert len({seen["digest"] for seen in found.values()}) == 1
    for seen in found.values():
        assert seen["finite"]
        assert seen["completed"] > 0
        assert seen["slowest"] < 5.0 + QUICK.longest + QUICK.redial + SLACK
