"""What comparisons of weights see, and whom they name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_traffic import pretended_job

from lightning_autosync.engine import replicas
from lightning_autosync.engine.replicas import ReplicaCheck, _gap, _is_beyond, _limits, bit_sum
from lightning_autosync.errors import ExchangeError


@pytest.mark.parametrize("shape", [(7,), (40, 300), (2048, 3)])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.uint8, torch.int32],
    ids=str,
)
def test_elements_that_changed_places_are_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weights = (100 * torch.rand(shape)).to(dtype)
    assert bit_sum(weights) == bit_sum(weights.clone())
    assert bit_sum(weights) != bit_sum(weights.flip(0))
    assert bit_sum(weights) != bit_sum(weights.roll(1, 0))


def told(weights: list[float], monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup | None = None) -> str:
    """The error where ranks hold these weights; what ranks say to each other is made here."""
    check, suspects = ReplicaCheck(1, group), {"head": torch.tensor([weights[0]])}
    answers = iter(
        [
            [["a form"]] * len(weights),
            [[(abs(weight - weights[0]), 0.0)] for weight in weights],
            [[int(bit_sum(torch.tensor([weight])))] for weight in weights],
        ]
    )
    monkeypatch.setattr(replicas, "_gap", lambda tensor, group: (0.0, 0.0))
    monkeypatch.setattr(replicas, "gather_json", lambda value, group: next(answers))
    with pytest.raises(ExchangeError) as caught:
        check._report(suspects)
    return str(caught.value)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, 1.0, 2.0, 1.0], "on rank 2 differ from those on rank 0."),
        ([2.0, 1.0, 1.0, 1.0], "on rank 0 differ from those on rank 1."),
        ([1.0, 2.0], "on rank 1 differ from those on rank 0."),
        ([1.0, 1.0 + 1e-6, 2.0], "on rank 2 differ from those on rank 0."),
    ],
)
def test_the_odd_rank_is_named(weights: list[float], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in told(weights, monkeypatch)


def test_ranks_of_a_group_are_named_as_the_job_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_job(4, rank=1):
        assert "on rank 3 differ from those on rank 1." in told([1.0, 2.0], monkeypatch, dist.new_group([1, 3]))


def trained(dtype: torch.dtype, size: int, rate: float, noise: float) -> torch.Tensor:
    """Weights after 1000 steps of equal gradients, by an optimizer that computes in single precision or better."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = (0.02 * torch.randn(size, generator=generator, dtype=wide)).to(dtype)
    direction = torch.randn(size, generator=generator, dtype=wide)
    for _ in range(1000):
        direction = 0.99 * direction + 0.14 * torch.randn(size, generator=generator, dtype=wide)
        rounding = 1 + noise * torch.rand(size, dtype=wide)
        weights = (weights.to(wide) * rounding - rate * direction).to(dtype)
    return weights


def gap(own: torch.Tensor, first: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    sent = first.view(-1).view(torch.uint8)
    monkeypatch.setattr(replicas.dist, "broadcast", lambda tensor, src, group: tensor.copy_(sent))
    return _gap(own, None)


@pytest.mark.parametrize("size", [8, 1000])
@pytest.mark.parametrize(
    ("dtype", "noise"), [(torch.float32, 1.2e-7), (torch.bfloat16, 1.2e-7), (torch.float64, 2.3e-16)]
)
def test_rounding_is_told_from_another_learning_rate(
    dtype: torch.dtype, noise: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(dtype, size, 1e-5, 0.0)
    rounded, other = trained(dtype, size, 1e-5, noise), trained(dtype, size, 2e-5, 0.0)
    limits = _limits(dtype, 1000)
    assert not _is_beyond(gap(rounded, first, monkeypatch), limits)
    assert _is_beyond(gap(other, first, monkeypatch), limits)


def test_one_flipped_element_of_a_small_tensor_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    first = torch.ones(4, dtype=torch.bfloat16)
    own = first.clone()
    own[2] += torch.finfo(torch.bfloat16).eps
    assert not _is_beyond(gap(own, first, monkeypatch), _limits(first.dtype, 1))
    assert _is_beyond(gap(own.long() + 1, first.long(), monkeypatch), _limits(torch.int64, 1))


def test_warnings_name_parameters_ranks_and_passes_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    apart = 1e-8
    monkeypatch.setattr(replicas, "rank_zero_warn", told.append)
    monkeypatch.setattr(replicas, "_gap", lambda tensor, group: (apart, 0.0))
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda tensor, operation, group: tensor.add_(1))
    monkeypatch.setattr(replicas, "gather_json", lambda value, group: [value, value])
    monkeypatch.setattr(ReplicaCheck, "_deviating", lambda self, tensors: ([1], 0))
    check = ReplicaCheck(2)
    for _ in range(9):
        check.count({"head": torch.ones(3)})
        apart = 3e-8 if check._passes > 6 else 1e-8
    assert len(told) == 2
    assert "'head' on rank 1 and rank 0 differ by at most 1e-08 of the largest weight" in told[0]
    assert "equal after 0 synchronized backward passes and differ after 2." in told[0]
    assert "by at most 3e-08" in told[1]


def test_frozen_weights_are_read_in_the_first_check_and_in_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    check = ReplicaCheck(1)
    monkeypatch.setattr(check, "run", lambda found: seen.append((check._passes, "body" in found)))
    for _ in range(13):
        check.count({"head": torch.ones(1)}, {"body": torch.ones(1)})
    assert [passes for passes, whole in seen if whole] == [1, 11]
    assert len(seen) == 12


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool], ids=str)
def test_any_difference_of_integers_is_an_error(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([1, 1, 1], dtype=dtype)

    def broadcast(octets: torch.Tensor, **about: object) -> None:
        octets.copy_(there.view(torch.uint8))

    monkeypatch.setattr(replicas.dist, "broadcast", broadcast)
    gap = replicas._gap(here, None)
    answers = iter([[["a form"]] * 2, [[(0.0, 0.0)], [gap]], [[int(bit_sum(there))], [int(bit_sum(here))]]])
    monkeypatch.setattr(replicas, "gather_json", lambda value, group: next(answers))
    with pytest.raises(ExchangeError, match="the weights of 'table' on rank 1 differ from those on rank 0"):
        ReplicaCheck(1)._report({"table": here})
