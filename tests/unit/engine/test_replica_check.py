"""What comparisons of weights see, and whom they name."""

from __future__ import annotations

import pytest
import torch

from lightning_autosync.engine import replicas
from lightning_autosync.engine.replicas import ReplicaCheck, _bit_sum
from lightning_autosync.errors import ExchangeError


@pytest.mark.parametrize("shape", [(7,), (40, 300), (2048, 3)])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.uint8, torch.int32],
    ids=str,
)
def test_elements_that_changed_places_are_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weights = (16 * torch.randn(shape)).abs().to(dtype)
    assert _bit_sum(weights) == _bit_sum(weights.clone())
    assert _bit_sum(weights) != _bit_sum(weights.flip(0))
    assert _bit_sum(weights) != _bit_sum(weights.roll(1, 0))


def told(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> str:
    """The error where ranks hold these weights; what ranks say to each other is made here."""
    check, suspects = ReplicaCheck(1), {"head": torch.tensor([weights[0]])}
    answers = iter(
        [
            [[abs(weight - weights[0])] for weight in weights],
            [[int(_bit_sum(torch.tensor([weight])))] for weight in weights],
        ]
    )
    monkeypatch.setattr(replicas, "_gap", lambda tensor, group: 0.0)
    monkeypatch.setattr(replicas, "gather_json", lambda value, group: next(answers))
    with pytest.raises(ExchangeError) as caught:
        check._report(suspects)
    return str(caught.value)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, 1.0, 2.0, 1.0], "on rank 2 are not those of rank 0."),
        ([2.0, 1.0, 1.0, 1.0], "on rank 0 are not those of rank 1."),
        ([1.0, 2.0], "on rank 1 are not those of rank 0."),
        ([1.0, 1.0 + 1e-6, 2.0], "on rank 2 are not those of rank 0."),
    ],
)
def test_the_odd_rank_is_named(weights: list[float], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in told(weights, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool], ids=str)
def test_any_difference_of_integers_is_an_error(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([1, 1, 1], dtype=dtype)

    def broadcast(octets: torch.Tensor, **about: object) -> None:
        octets.copy_(there.view(torch.uint8))

    monkeypatch.setattr(replicas.dist, "broadcast", broadcast)
    gap = replicas._gap(here, None)
    answers = iter([[[0.0], [gap]], [[int(_bit_sum(there))], [int(_bit_sum(here))]]])
    monkeypatch.setattr(replicas, "gather_json", lambda value, group: next(answers))
    with pytest.raises(ExchangeError, match="the weights of 'table' on rank 1 are not those of rank 0"):
        ReplicaCheck(1)._report({"table": here})
