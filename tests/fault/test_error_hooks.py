"""Hooks after an error meet the other ranks where all end alike, and end soon where they do not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from error_hooks import STRUCK, WRITING
from ports import free_port

LIMIT = 60.0
"""Seconds that all may take to end, on a busy machine."""
FAST = [("ring", 0, False)]
"""Kind, victim and whether its process lives on: cases of `make test`."""
ENDS = {"error": "ValueError: no luck", "sigterm": "SIGTERMException: "}


def ended(folder: Path, kind: str, how: str, ranks: list[int], lasting: bool = False) -> list[dict[str, Any]]:
    """What each of three ranks tells where ``ranks`` meet a fault; ``lasting`` processes live on until all ended."""
    options = {"folder": str(folder), "kind": kind, "how": how, "ranks": ranks, "lasting": lasting}
    with Crew("error_hooks:train", 3, port=free_port(), **options) as crew:
        return [crew.result(rank, LIMIT) for rank in range(3)]


def steps(folder: Path) -> int:
    """Steps in the checkpoint, which is whole."""
    found: int = torch.load(folder / "on_exception.ckpt", weights_only=True)["global_step"]
    return found


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("native", "sigterm"),
        *(pytest.param(kind, "error", marks=pytest.mark.slow) for kind in ("native", "parameter server")),
    ],
)
def test_ranks_that_end_alike_save_a_checkpoint_together(tmp_path: Path, kind: str, how: str) -> None:
    found = ended(tmp_path, kind, how, [0, 1, 2])
    assert [(seen["error"], len(seen["told"])) for seen in found] == [(ENDS[how], 1)] * 3
    assert all(seen["at"] >= found[0]["written"] > 0.0 for seen in found)
    assert steps(tmp_path) == (STRUCK if how == "error" else STRUCK + 1)


@pytest.mark.parametrize(
    ("kind", "victim", "lasting"),
    [
        *FAST,
        *(
            pytest.param(kind, victim, lasting, marks=pytest.mark.slow)
            for kind, victim, lasting in itertools.product(["native", "ring"], [0, 1], [False, True])
            if (kind, victim, lasting) not in FAST
        ),
    ],
)
def test_an_error_of_one_rank_ends_all_once_the_checkpoint_is_written(
    tmp_path: Path, kind: str, victim: int, lasting: bool
) -> None:
    found = ended(tmp_path, kind, "error", [victim], lasting)
    errors = [seen["error"] for seen in found]
    assert all("ValueError: no luck" in error for error in errors), errors
    assert all(seen["seconds"] < WRITING + 15.0 for seen in found)
    assert found[victim]["at"] >= found[0]["written"] > 0.0
    assert steps(tmp_path) == STRUCK
