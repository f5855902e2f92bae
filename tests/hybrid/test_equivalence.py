"""The check before training accepts right rewrites and refuses wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid import calls
from hybrid.faults import FAULTS


@pytest.mark.parametrize("model", ["dropping", "language"])
def test_right_rewrites_are_accepted(pool: Any, model: str) -> None:
    assert set(pool.run(calls.check, model=model)) == {""}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rewrites_are_refused(pool: Any, fault: str) -> None:
    told = pool.run(calls.check, model=FAULTS[fault][0], fault=fault)[:4]
    assert len(set(told)) == 1, "every rank is told the same"
    assert "unsplit" in told[0]
