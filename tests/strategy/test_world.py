"""Who is named when a collective call of a relaxed job fails."""

from __future__ import annotations

import pytest

from lightning_autosync.errors import ExchangeError
from lightning_autosync.strategy.process_group import GroupMembers, LossMonitor


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
    assert "closed by peer; the first whose connection failed is rank 3" in str(error)
