"""A rank of a Trainer's job dies or stops under averages: the others go on and end well, and it can come back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from averaging_faults import HEARTBEAT
from crew import Crew
from ports import free_port
from test_mesh_faults import SLACK
from trainer_faults import EPOCHS, VICTIM

BOUND = HEARTBEAT.longest + HEARTBEAT.redial + 3 * SLACK
OTHERS = (0, 1)


def crew_of(folder: Path, **arguments: Any) -> Crew:
    """Three ranks."""
    ports = {"port": free_port(), "meeting_port": free_port()}
    return Crew("trainer_faults:train", 3, folder=str(folder), **ports, **arguments)


def survivors(folder: Path, how: str, **arguments: Any) -> list[dict[str, Any]]:
    """What the others told, and after how many seconds."""
    with crew_of(folder, **arguments) as crew:
        crew.wait_for("struck", 1)
        struck = time.time()
        getattr(crew, how)(VICTIM)
        found = [crew.result(rank, 80.0) for rank in OTHERS]
    return [{**seen, "took": seen["at"] - struck} for seen in found]


def check_end(found: list[dict[str, Any]], ranks: int) -> None:
    """All ended well, with one model, of which their metrics speak alike."""
    assert [(seen["error"], seen["epochs"], seen["finite"]) for seen in found] == [("", EPOCHS, True)] * len(found)
    assert {seen["answering"] for seen in found} == {ranks}
    assert len({seen["digest"] for seen in found}) == 1
    assert len({tuple(seen["scores"]) for seen in found}) == 1
    assert found[0]["scores"][0] == pytest.approx(found[0]["scores"][1])
    assert len({(seen["best"], seen["steps"]) for seen in found}) == 1
    torch.load(found[0]["best"], weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "plan"), [("kill", "partial_reduce"), ("stop", "partial_reduce"), ("kill", "periodic")]
)
def test_the_others_go_on_and_answer_for_all(tmp_path: Path, how: str, plan: str) -> None:
    found = survivors(tmp_path, how, plan=plan)
    check_end(found, len(OTHERS))
    assert all(seen["took"] < BOUND for seen in found)


@pytest.mark.parametrize("plan", ["partial_reduce", pytest.param("periodic", marks=pytest.mark.slow)])
def test_a_rank_that_is_started_again_takes_up_where_the_others_are(tmp_path: Path, plan: str) -> None:
    """It finds a checkpoint that it had not found at first, and does not go on from there."""
    with crew_of(tmp_path, plan=plan, returns=True, again=True) as crew:
        crew.wait_for("struck", 1)
        crew.kill(VICTIM)
        crew.start(VICTIM)
        found = [crew.result(rank, 80.0) for rank in range(3)]
    check_end(found, 3)
    assert [seen["came back"] for seen in found] == [False, False, True]
    back = found[VICTIM]
    # It had its schedule from the others. It may be back before the epoch ends in which it was lost.
    assert 0 < len(back["rates"]) <= EPOCHS
    assert back["rates"] == found[0]["rates"][EPOCHS - len(back["rates"]) :]
    if plan == "periodic":  # each has 20 batches an epoch, and who comes late makes no more steps than the others
        assert back["steps"] == 20 * EPOCHS
    # So had its callbacks, which decide together.
    assert back["waited"] == found[0]["waited"]


@pytest.mark.slow
def test_a_rank_does_not_come_back_where_ranks_meet_within_an_epoch(tmp_path: Path) -> None:
    with crew_of(tmp_path, plan="periodic", returns=True, interval=0.5) as crew:
        crew.wait_for("struck", 1)
        crew.kill(VICTIM)
        crew.start(VICTIM)
        error = crew.result(VICTIM, 80.0)["error"]
    assert error.startswith("PlanError: this rank cannot rejoin: it missed validation or checkpoints within the epoch")


@pytest.mark.slow
def test_a_loss_while_all_wait_for_each_other_is_a_clear_error(tmp_path: Path) -> None:
    found = survivors(tmp_path, "kill", where="validation")
    assert all(
        "ExchangeError" in seen["error"] and "resume from the last checkpoint" in seen["error"] for seen in found
    )
    assert all(seen["took"] < BOUND and seen["finite"] for seen in found)


def test_an_error_while_all_wait_for_each_other_is_told_to_the_others(tmp_path: Path) -> None:
    with crew_of(tmp_path, where="error in validation") as crew:
        found = [crew.result(rank, 80.0) for rank in OTHERS]
    assert all(f"rank {VICTIM} is lost (it ended with ValueError: no luck)" in seen["error"] for seen in found)


def test_a_loss_before_the_mesh_is_open_is_named(tmp_path: Path) -> None:
    found = survivors(tmp_path, "kill", where="setup")
    assert all(f"rank {VICTIM} is lost: its process has ended" in seen["error"] for seen in found)
