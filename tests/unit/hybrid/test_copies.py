"""Which ranks compare their copies of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any
from unittest import mock

import pytest
from collective_traffic import pretended_job
from torch import Tensor, nn

from lightning_autosync.engine import replicas
from lightning_autosync.engine.replicas import ReplicaCheck
from lightning_autosync.errors import ExchangeError
from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution import copies
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.reduction import GradientReduction, ReductionSettings
from lightning_autosync.hybrid.execution.split_model import SplitModel


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with pretended_job(8), mock.patch.object(GradientReduction, "_engine"):
        yield


@pytest.mark.parametrize("signature", [*product(("dp", "rep", "col", "row"), repeat=3)], ids="-".join)
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_all_ranks_with_the_same_part_compare_it(signature: Any, trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = HybridPlan(mesh=(2, 2, 2), layers=(LayerPlan(module="", signature=signature),))
    split = SplitModel(nn.Linear(8, 8), plan, LiveMesh(plan))
    split.split()
    compared: dict[str, int] = {}

    class Check(ReplicaCheck):
        def __init__(self, every: int, group: Any) -> None:
            super().__init__(every, group)
            self.size = group.size()

        def count(self, parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
            compared.update(dict.fromkeys([*parameters, *frozen], self.size))

    monkeypatch.setattr(copies, "ReplicaCheck", Check)
    split.module.weight.requires_grad_(trains)
    with GradientReduction(split, ReductionSettings(check_replicas=1)).backward():
        pass
    expected = {name: 8 // part.shard.pieces for name, part in split.parts.items()}
    assert compared == {name: count for name, count in expected.items() if count > 1}


@pytest.fixture
def reduction() -> GradientReduction:
    signatures = {"0": ("dp", "rep", "col"), "1": ("dp", "dp", "dp")}
    layers = tuple(LayerPlan(module=path, signature=signature) for path, signature in signatures.items())
    plan = HybridPlan(mesh=(2, 2, 2), layers=layers)
    split = SplitModel(nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 8, max_norm=1.0)), plan, LiveMesh(plan))
    split.split()
    with mock.patch.object(replicas, "rank_zero_warn") as warn:
        found = GradientReduction(split, ReductionSettings(check_replicas=2))
    assert "'1.weight' is an embedding with max_norm" in warn.call_args.args[0]
    return found


def _backward(reduction: GradientReduction) -> None:
    with reduction.backward():
        pass


def test_freezing_in_turn_does_not_put_off_the_comparison(reduction: GradientReduction) -> None:
    layer = reduction._split.module[0]
    with mock.patch.object(ReplicaCheck, "run") as run:
        for number in range(3):
            layer.bias.requires_grad_(number % 2 == 0)
            _backward(reduction)
    (call,) = run.call_args_list
    assert call.args[0].keys() == {"0.weight", "0.bias"}, "after two passes"


def test_frozen_copies_are_compared_at_the_end_and_shortened_rows_never(reduction: GradientReduction) -> None:
    reduction._split.module[0].weight.requires_grad_(False)
    _backward(reduction)
    with mock.patch.object(ReplicaCheck, "run") as run:
        reduction.compare_copies()
    assert [call.args[0].keys() for call in run.call_args_list] == [{"0.weight", "0.bias"}]
    reduction.close()
    with mock.patch.object(ReplicaCheck, "run") as run:
        reduction.compare_copies()
    run.assert_not_called()


def test_a_difference_between_some_ranks_is_an_error_on_all(reduction: GradientReduction) -> None:
    gathered = [[], ["replicas differ"], [], []]
    with (
        mock.patch.object(ReplicaCheck, "run"),
        mock.patch.object(copies, "gather_json", return_value=gathered),
        pytest.raises(ExchangeError, match="replicas differ"),
    ):
        reduction.compare_copies()
