"""What the probe measures of touched rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from lightning_autosync.measure.probe import costs


def test_a_search_has_touched_rows_to_find_and_a_merge_has_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with next to no touched rows are searched several times as fast as those of a training step."""
    shares: list[float] = []

    def searched(table: Tensor) -> Tensor:
        shares.append(float(table.any(dim=1).float().mean()))
        return table

    def seconds(action: Callable[[], object]) -> float:
        action()
        return 1e-3

    monkeypatch.setattr(costs, "touched_rows", searched)
    monkeypatch.setattr(costs, "core_seconds", seconds)
    found = costs._rows()
    assert found == {
        "scan_rate": pytest.approx(4 * 2**20 / 1e-3),
        "merge_core": pytest.approx(1e-3 / costs._IN_A_ROW / 2),
    }
    assert set(shares) == {1 / 8}


def test_caches_are_emptied_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Others:
        def add_(self, _: float) -> None:
            order.append("emptied")

    def made(*shape: int) -> object:
        assert 4 * shape[0] >= 32 * 2**20
        return Others()

    with monkeypatch.context() as context:
        context.setattr(costs.torch, "zeros", made)
        costs._cold_seconds(lambda: order.append("run"))
    assert order == ["emptied", "run"] * (len(order) // 2)
    assert len(order) > 2
