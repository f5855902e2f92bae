"""Collective calls of relaxed jobs: refused between steps, and errors that name who is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy.process_group import NAMES, GroupMembers, LossMonitor, refused_collectives


def test_each_is_refused_by_name_and_restored_whatever_happens() -> None:
    before = {name: getattr(dist, name) for name in NAMES}
    for name in NAMES:
        with pytest.raises(KeyError, match=f"torch.distributed.{name}"), refused_collectives(KeyError):
            getattr(dist, name)(torch.ones(1))
    assert {name: getattr(dist, name) for name in NAMES} == before


def test_one_inside_the_other_restores_too() -> None:
    before = dist.barrier
    with refused_collectives(KeyError):
        with refused_collectives(ValueError), pytest.raises(ValueError, match="barrier"):
            dist.barrier()
        with pytest.raises(KeyError):
            dist.barrier()
    assert dist.barrier is before


def test_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(dist, "barrier", called.append)
    with refused_collectives(KeyError):
        other = threading.Thread(target=lambda: dist.barrier("elsewhere"))
        other.start()
        other.join()
    assert called == ["elsewhere"]


def test_backward_passes_on_other_threads_are_refused_too() -> None:
    """On accelerators, hooks of a backward pass run on autograd's own threads."""
    found: list[Exception] = []

    def make_a_pass() -> None:
        weight = torch.ones(1, requires_grad=True)
        weight.register_hook(lambda _: dist.barrier())
        try:
            weight.backward()
        except KeyError as error:
            found.append(error)

    with refused_collectives(KeyError):
        other = threading.Thread(target=make_a_pass)
        other.start()
        other.join()
    assert [str(one) for one in found] == ["'torch.distributed.barrier'"]


def test_where_only_a_connection_is_lost_ranks_name_those_that_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossMonitor, "answer_timeout", 0.05)
    lost: dict[int, str] = {}
    told: list[ExchangeError] = []

    def tell(error: ExchangeError) -> None:
        told.append(error)
        lost[2] = "it ended with ExchangeError: closed by peer"  # as the other end does, too

    error = LossMonitor("a barrier", GroupMembers(0, lambda: lost, tell, 1.0)).explain("closed by peer")
    assert [str(one) for one in told] == ["closed by peer"]
    assert "rank 2 is lost (it ended with ExchangeError: closed by peer)" in str(error)


def test_where_a_rank_is_lost_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossMonitor, "answer_timeout", 0.05)
    told: list[ExchangeError] = []
    error = LossMonitor("a barrier", GroupMembers(0, lambda: {1: "it is silent"}, told.append, 1.0)).explain(
        "closed by peer"
    )
    assert told == []
    assert "rank 1 is lost (it is silent)" in str(error)


def test_where_nobody_answers_the_first_to_notice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossMonitor, "answer_timeout", 0.05)
    error = LossMonitor("a barrier", GroupMembers(3, dict, lambda _: None, 1.0)).explain("closed by peer")
    assert "closed by peer; the connection of rank 3 failed first" in str(error)
