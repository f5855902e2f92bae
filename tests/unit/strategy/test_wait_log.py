"""The log of a job that overlaps says why some of its steps wait."""

from __future__ import annotations

import pytest

from lightning_autosync.strategy import overlap


def test_each_reason_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", told.append)
    log = overlap.WaitLog()
    log.tell(False, False, False, False)
    log.tell(False, False, False, True)
    for _ in range(2):
        log.tell(False, False, True, False)
        log.tell(True, False, True, False)
    assert [line.partition("backward pass ")[2].split()[0:3] for line in told] == [
        ["while", "batch_shares='auto'", "measures"],
        ["in", "each", "step"],
        ["for", "a", "while,"],
    ]
