"""Ranks whose searches differ make one choice."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.strategy import hybrid_choice
from lightning_autosync.strategy.hybrid_choice import Choice, common_choice

PLAN = HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),))
PLAIN = Choice(reason="rank 0's", notes=("a note",))


def chosen(monkeypatch: pytest.MonkeyPatch, *choices: Choice) -> set[Choice]:
    """What ranks with these choices choose together."""
    told: list[Any] = []
    monkeypatch.setattr(hybrid_choice, "gather_json", lambda own: told.append(own) or [own])
    for own in choices:
        common_choice(own)
    with mock.patch.object(hybrid_choice, "gather_json", return_value=told):
        return {common_choice(own) for own in choices}


def test_without_limits_rank_zero_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, PLAIN, Choice((PLAN,), "rank 1's")) == {PLAIN}


def test_what_fits_on_rank_zero_may_not_fit_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Choice(reason="it fits", needs=1e6)
    larger = Choice((PLAN,), "it does not fit", fits=False, needs=3e6)
    largest = Choice((PLAN,), "it does not fit at all", fits=False, needs=4e6)
    assert chosen(monkeypatch, small, larger, largest) == {largest}
    assert chosen(monkeypatch, largest, small, larger) == {largest}
