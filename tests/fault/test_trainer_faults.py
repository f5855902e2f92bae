"""A rank of a Trainer's job under partial reduce dies or stops: the others end well, or with a bounded, clear error."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from averaging_faults import HEARTBEAT
from crew import Crew
from test_mesh_faults import SLACK
from trainer_faults import VICTIM

BOUND = HEARTBEAT.longest + HEARTBEAT.redial + 2 * SLACK


def survivors(how: str, asks: bool) -> list[dict[str, Any]]:
    """What the others told, and after how many seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Crew("trainer_faults:train", 3, port=port, asks=asks) as crew:
        crew.wait_for("struck", 1)
        struck = time.time()
        getattr(crew, how)(VICTIM)
        found = [crew.result(rank, 80.0) for rank in range(3) if rank != VICTIM]
    return [{**seen, "took": seen["at"] - struck} for seen in found]


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_who_asks_all_ranks_after_one_is_lost_is_told_so(how: str) -> None:
    for seen in survivors(how, asks=True):
        assert seen["error"].startswith(
            "ExchangeError: sync_dist=True (a reduction over ranks) needs all ranks: rank 2"
        )
        assert seen["error"].endswith("a checkpoint that is due now may be missing: go on from the last that there is")
        assert seen["took"] < BOUND
        assert seen["finite"]


def test_without_such_a_question_the_others_end_with_one_model() -> None:
    found = survivors("kill", asks=False)
    assert [(seen["error"], seen["epochs"], seen["finite"]) for seen in found] == [("", 2, True)] * 2
    assert len({seen["digest"] for seen in found}) == 1
    assert all(seen["took"] < BOUND for seen in found)
