"""A training that fails leaves nothing open."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autosync.lab.convergence import trial


def test_a_failed_training_lets_go_without_waiting() -> None:
    told: list[str] = []

    class Way:
        def abandon(self) -> None:
            told.append("abandoned")

        def close(self) -> None:
            raise AssertionError("closing waits for the others")

    class Fails:
        def run(self) -> dict[str, Any]:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        trial._run_or_abandon(Way(), Fails())  # type: ignore[arg-type]
    assert told == ["abandoned"]
