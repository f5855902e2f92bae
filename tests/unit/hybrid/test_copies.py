"""Which ranks compare their copies of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from lightning_autosync.engine.replicas import ReplicaCheck
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution import reduction
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction, ReductionSettings
from lightning_autosync.hybrid.execution.split_model import SplitModel
from lightning_autosync.hybrid.traffic import pretended_job


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with pretended_job(8), mock.patch.object(GradientReduction, "_engine"):
        yield


@pytest.mark.parametrize("signature", [*product(("dp", "rep", "col", "row"), repeat=3)], ids="-".join)
def test_all_ranks_with_the_same_part_compare_it(signature: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = HybridPlan(mesh=(2, 2, 2), layers=(LayerPlan(module="", signature=signature),))
    split = SplitModel(nn.Linear(8, 8), plan, LiveMesh(plan))
    split.split()
    compared: dict[str, int] = {}

    class Check(ReplicaCheck):
        def __init__(self, every: int, group: Any) -> None:
            super().__init__(every, group)
            self.size = group.size()

        def count(self, parameters: Mapping[str, Tensor]) -> None:
            compared.update(dict.fromkeys(parameters, self.size))

    monkeypatch.setattr(reduction, "ReplicaCheck", Check)
    with GradientReduction(split, ReductionSettings(check_replicas=1)).backward():
        pass
    copies = {name: 8 // part.shard.pieces for name, part in split.parts.items()}
    assert compared == {name: count for name, count in copies.items() if count > 1}
