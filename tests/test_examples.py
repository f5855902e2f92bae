"""The examples run, and end with the accuracy that a reader would expect."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    done = forked.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "trainer",
        pytest.param("fabric", marks=pytest.mark.slow),
        pytest.param("plan_by_hand", marks=pytest.mark.slow),
        pytest.param("split_operators", marks=pytest.mark.slow),
    ],
)
def test_example_trains(name: str) -> None:
    accuracy = re.search(r"validation accuracy (0\.\d+)", run(name))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.slow
def test_recommender_reaches_the_same_loss_both_ways() -> None:
    losses = re.findall(r"loss (\d\.\d+)", run("recommender"))
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_demo_equals_ddp() -> None:
    assert "Weights equal DDP's" in run("demo")
