"""Which backward passes are synchronized; what follows one that failed, and layers that come while a model trains."""

from __future__ import annotations

import pass_jobs
import pytest


@pytest.mark.parametrize("plan", ["all_reduce", "packed_trees"])
def test_a_rank_whose_loss_reaches_no_parameter_takes_part(duo, plan: str) -> None:
    assert duo.run(pass_jobs.unreached, plan=plan) == [[1.0, 5.0, 100.0]] * 2


def test_a_forward_pass_after_a_failed_backward_pass_raises_as_under_ddp(duo) -> None:
    for theirs in duo.run(pass_jobs.caught, ddp=True):
        assert theirs.startswith("RuntimeError: Expected to have finished reduction")
    for ours in duo.run(pass_jobs.caught, ddp=False):
        assert ours.startswith("ExchangeError: an earlier backward pass failed on this rank")


@pytest.mark.parametrize("strategy", [{}, {"plan": "all_reduce", "overlap": "step"}])
def test_new_layers_are_made_equal(duo, strategy: dict[str, str]) -> None:
    assert duo.run(pass_jobs.new_layers, **strategy) == [0.0, 0.0]
