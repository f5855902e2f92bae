"""Whatever a plan is made of, and whatever asks all ranks, every survivor names the rank that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from crew import Crew
from named_ranks import KINDS, TUNING
from ports import free_port
from sweeps import sweep

VICTIM = 1
TIMEOUT = 8.0
LONG = 600.0
LIMIT = 60.0
"""Seconds that all may take to end, on a busy machine."""
WHY = {
    "kill": "its process has ended",
    "stop": "it does not answer",
    "stuck": "it is alive, but has not reached this collective call",
    "exception": "it ended with ValueError: a fault of this rank's own",
    "term": "it got a SIGTERM",
}
CALLS = ("barrier", "broadcast", "all_gather", "decision", "reduce", "gather_json", "metric", "own call")


@contextmanager
def crew_of(function: str, size: int, **options: Any) -> Iterator[Crew]:
    port = free_port()
    with Crew(f"named_ranks:{function}", size, port=port, **options) as crew:
        yield crew


def survivors(how: str, victim: int = VICTIM, size: int = 3, function: str = "train", **options: Any) -> list[Any]:
    """What all beside the victim raise; only a stopped or stuck rank may keep them waiting, until their time-out."""
    timeout = TIMEOUT if how in {"stop", "stuck"} else LONG
    with crew_of(function, size, how=how, victim=victim, timeout=timeout, **options) as crew:
        crew.wait_for("reached", size)
        return [crew.result(rank, LIMIT) for rank in range(size) if rank != victim]


def check(found: list[Any], how: str, victim: int = VICTIM) -> None:
    for seen in found:
        assert "ExchangeError" in seen["kinds"], found
        assert f"rank {victim} is lost: {WHY[how]}" in seen["error"], found


@pytest.mark.parametrize("how", sweep(["kill", "stop", "stuck", "exception", "term"], ["kill"]))
@pytest.mark.parametrize("kind", sweep(KINDS, ["native"]))
def test_every_survivor_names_the_rank(kind: str, how: str) -> None:
    check(survivors(how, size=4 if kind == "two-level native" else 3, kind=kind), how)


@pytest.mark.parametrize("how", sweep(["kill", "stop", "stuck", "exception", "term"], ["kill"]))
def test_every_survivor_names_the_rank_while_plans_are_tried(how: str) -> None:
    check(survivors(how, kind=TUNING), how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "stuck"])
def test_the_first_rank_is_named_too(how: str) -> None:
    check(survivors(how, victim=0, kind="native"), how, 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "stuck"])
@pytest.mark.parametrize("where", CALLS)
def test_whatever_asks_all_ranks_names_the_rank(where: str, how: str) -> None:
    check(survivors(how, kind="shared memory", where=where), how)


@pytest.mark.parametrize("how", sweep(["kill", "stop"], ["kill"]))
@pytest.mark.parametrize("kind", sweep(["native", "tree"], ["tree"]))
@pytest.mark.parametrize("debug", [False, True])
def test_readers_name_the_rank_whose_sums_their_steps_wait_for(debug: bool, kind: str, how: str) -> None:
    timeout = TIMEOUT if how == "stop" else LONG
    options = {"kind": kind, "how": how, "victim": VICTIM, "timeout": timeout, "debug": debug}
    with crew_of("train_with_overlap", 3, **options) as crew:
        found = [crew.result(rank, LIMIT) for rank in (0, 2)]
    check(found, how)
    for seen in found:
        check(seen["read"], how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "exception", "term"])
def test_under_the_other_framework(how: str) -> None:
    check(survivors(how, kind="native", package="pytorch_lightning"), how)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["training", "barrier"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_under_fabric(where: str, how: str) -> None:
    check(survivors(how, function="train_with_fabric", where=where), how)


@pytest.mark.slow
def test_a_rank_that_stops_in_a_second_module_is_named_under_fabric() -> None:
    check(survivors("stop", function="train_with_fabric", where="training", modules=2), "stop")


@pytest.mark.slow
def test_an_error_of_the_users_loop_under_fabric() -> None:
    for seen in survivors("exception", function="train_with_fabric", where="training"):
        assert f"rank {VICTIM} is lost: its process has ended" in seen["error"]


@pytest.mark.slow
def test_a_sigterm_ends_a_rank_that_waits_for_a_stopped_one() -> None:
    with crew_of("train", 3, kind="native", how="stop", victim=VICTIM, timeout=LONG) as crew:
        crew.wait_for("reached", 3)
        crew.terminate(2)
        ended, told = crew.result(2, LIMIT), crew.result(0, LIMIT)
    assert "this rank got a SIGTERM" in ended["error"]
    assert "rank 2 is lost: it got a SIGTERM" in told["error"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [VICTIM, 0])
def test_a_rank_that_goes_on_too_late_learns_why_it_was_given_up(victim: int) -> None:
    with crew_of("train", 3, kind="native", how="stop", victim=victim, timeout=TIMEOUT) as crew:
        crew.wait_for("reached", 3)
        check([crew.result(rank, LIMIT) for rank in range(3) if rank != victim], "stop", victim)
        crew.go_on(victim)
        late = crew.result(victim, LIMIT)
    assert "ExchangeError" in late["kinds"]
    assert f"expelled this rank ({victim}): it does not answer" in late["error"]
