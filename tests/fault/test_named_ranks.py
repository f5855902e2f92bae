"""Whatever a plan is made of, every survivor names the rank that failed."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from crew import HOST, Crew
from named_ranks import KINDS

VICTIM, SIZE = 1, 3
TIMEOUT = 8.0
LIMIT = 60.0


def survivors(kind: str, how: str, victim: int = VICTIM, **options: Any) -> dict[int, dict[str, Any]]:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    options = {"timeout": TIMEOUT, **options}
    with Crew("named_ranks:train", SIZE, port=port, kind=kind, how=how, victim=victim, **options) as crew:
        crew.wait_for("reached", SIZE)
        found = {rank: crew.result(rank, LIMIT) for rank in range(SIZE) if rank != victim or how not in ("kill", "stop")}
        struck = float(crew.text("struck"))
    return {rank: {**seen, "took": seen["at"] - struck} for rank, seen in found.items()}


@pytest.mark.parametrize("how", ["kill", "stop", "exception", "term"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_survivor_names_the_rank(kind: str, how: str) -> None:
    found = survivors(kind, how)
    for rank in set(found) - {VICTIM}:
        assert "ExchangeError" in found[rank]["kinds"], found
        assert f"rank {VICTIM} is lost" in found[rank]["error"], found
    print(kind, how, {r: (round(s["took"], 2), s["kinds"][0], s["error"]) for r, s in found.items()})
