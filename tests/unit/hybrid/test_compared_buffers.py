"""Buffers between split layers are compared before passes, not at each use."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_traffic import pretended_job
from torch import Tensor, nn

from lightning_autosync.hybrid import HybridPlan, LayerPlan
from lightning_autosync.hybrid.execution.activation import bring_home
from lightning_autosync.hybrid.execution.compared_buffers import checksum
from lightning_autosync.hybrid.execution.live_mesh import LiveMesh
from lightning_autosync.hybrid.execution.split_model import SplitModel

INPUTS = torch.ones(2, 4)
PLAN = HybridPlan(mesh=(2,), layers=(LayerPlan(module="up", signature=("col",)),))


class Sliced(nn.Module):
    """Uses slices of a buffer, which are new tensors each time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.register_buffer("scale", torch.ones(2, 8))
        self.step = 0.0
        self.hidden = False

    def forward(self, x: Tensor) -> Tensor:
        value = self.up(x) * self.scale[0]
        if self.hidden:
            self.scale.data.add_(self.step)
        elif self.step:
            self.scale.add_(self.step)
        return value + self.scale[1]


@pytest.fixture
def split() -> Iterator[SplitModel]:
    with pretended_job(2):
        found = SplitModel(Sliced(), PLAN, LiveMesh(PLAN))
        found.split()
        yield found


def comparisons(split: SplitModel) -> tuple[int, int]:
    """The numbers of comparisons before a pass, and within it."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as made, split.forward(INPUTS):
        before = made.call_count
        found = split.module(INPUTS)
        within = made.call_count - before
        bring_home(found)
    return before, within


def test_constant_buffers_are_compared_with_what_is_compared_anyway(split: SplitModel) -> None:
    assert comparisons(split) == (1, 2)
    assert [comparisons(split) for _ in range(3)] == [(1, 0)] * 3
    split.module.eval()
    assert [comparisons(split) for _ in range(2)] == [(1, 2), (1, 0)]
    split.module.train()
    assert comparisons(split) == (1, 0)


@pytest.mark.parametrize("hidden", [False, True])
def test_each_use_of_a_buffer_that_passes_change_is_compared(split: SplitModel, hidden: bool) -> None:
    split.module.step, split.module.hidden = 1.0, hidden
    assert [comparisons(split) for _ in range(3)] == [(1, 2)] * 3


def test_a_later_change_calls_no_collective_and_is_told(split: SplitModel) -> None:
    comparisons(split)
    split.module.step = 1.0
    assert comparisons(split) == (1, 0), "ranks without the change call none"
    assert split.around.record.take()[2] != 0
    assert comparisons(split) == (1, 2)


def test_inference_mode(split: SplitModel) -> None:
    split.module.eval()
    with torch.inference_mode():
        assert [comparisons(split) for _ in range(3)] == [(1, 2), (1, 0), (1, 0)]


def test_a_buffer_that_differs_before_a_pass_comes_home_without_a_comparison(split: SplitModel) -> None:
    comparisons(split)
    largest = LiveMesh.largest

    def differing(mesh: LiveMesh, numbers: Tensor) -> list[int]:
        found = largest(mesh, numbers)
        return [*found[:1], found[1] + 1, *found[2:]] if len(found) == 5 else found

    with mock.patch.object(LiveMesh, "largest", differing), split.forward(INPUTS):
        assert split.around.alike(split.module.get_buffer("scale")[0]) is False


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([True, False, False, True], [False, True, True, False]),
        ([0.0, 1.0, -2.0, 3.0], [-0.0, 1.0, -2.0, -3.0]),
        (list(range(40)), list(range(39, -1, -1))),
        ([1.0, 2.0, 0.0], [1.0, 2.0]),
    ],
)
@pytest.mark.parametrize("repeats", [1, 9])
def test_checksums(one: list[float], other: list[float], repeats: int) -> None:
    first, second = torch.tensor(one).repeat(repeats), torch.tensor(other).repeat(repeats)
    assert checksum(first) == checksum(first.clone())
    for dtype in (first.dtype, torch.float64):
        assert checksum(first.to(dtype)) != checksum(second.to(dtype))


def test_checksums_of_unusual_tensors() -> None:
    value = torch.arange(12.0).view(3, 4)
    assert checksum(value.t()) == checksum(value.t().contiguous())
    assert checksum(torch.tensor(True)) != checksum(torch.tensor(False))
    assert checksum(torch.empty(0)) == 0
    ones = torch.ones(2**21 + 3, dtype=torch.int64)
    changed = ones.clone()
    changed[-1] = 2
    assert checksum(ones) != checksum(changed)
