"""Collective calls that ranks of relaxed plans may not make."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_autosync.strategy.process_group import refused_collectives


@pytest.mark.parametrize(
    ("old", "new"),
    [("all_gather_into_tensor", "all_gather_single"), ("reduce_scatter_tensor", "reduce_scatter_single")],
)
def test_a_function_is_refused_by_its_old_and_its_new_name(old: str, new: str) -> None:
    with refused_collectives(ValueError):
        for name in (old, new):
            if hasattr(dist, name):
                with pytest.raises(ValueError, match=name):
                    getattr(dist, name)()
