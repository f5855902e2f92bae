"""Errors when a process group cannot be made: torch's own name no rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_autosync.engine.collectives import new_group
from lightning_autosync.errors import ExchangeError


@pytest.mark.parametrize(
    ("error", "ranks", "told"),
    [
        (dist.DistStoreError("wait timeout after 12000ms, keys: /default_pg/0//2//cpu//0/1"), None, "rank 1 did not"),
        (dist.DistStoreError("wait timeout after 12000ms, keys: /default_pg/0//2//cpu//0/1"), (4, 7), "rank 7 did not"),
        (dist.DistNetworkError("Broken pipe"), None, "the connection to the job's store, on the host of rank 0, broke"),
    ],
)
def test_the_error_names_a_rank(
    error: Exception, ranks: tuple[int, ...] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(ExchangeError, match=f"a process group could not be made: {told}"):
        new_group(timedelta(seconds=1), ranks)
