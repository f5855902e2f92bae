"""What tests of split models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collective_traffic import pretended_job
from torch import nn

from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.split_model import SplitModel


@pytest.fixture
def split() -> Iterator[SplitModel]:
    """A layer whose output features are split over two ranks."""
    plan = HybridPlan(mesh=(2,), layers=(LayerPlan(module="", signature=("col",)),))
    with pretended_job(2):
        found = SplitModel(nn.Linear(8, 8), plan, LiveMesh(plan))
        found.split()
        yield found
