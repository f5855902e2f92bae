"""Codecs: sizes as announced, errors as bounded, counts exact, overflows visible."""

from __future__ import annotations

import resource
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples

from lightning_autosync.engine.codecs import encode_with_feedback, make_codec
from lightning_autosync.engine.exchanges.base import CodedRange
from lightning_autosync.plan import Compressor
from lightning_autosync.plan.codecs import encoded_bytes
from lightning_autosync.plan.codecs.powersgd import low_rank_layout

COMPRESSORS = {
    "fp16": Compressor(kind="fp16"),
    "bf16": Compressor(kind="bf16"),
    "int8": Compressor(kind="int8", block=7),
    "topk": Compressor(kind="topk", ratio=0.2),
}


def through(compressor: Compressor, values: torch.Tensor, tail: int) -> torch.Tensor:
    codec = make_codec(compressor, values.numel(), tail)
    assert codec is not None
    wire = torch.empty(codec.size, dtype=torch.uint8)
    assert codec.size == encoded_bytes(compressor, values.numel(), tail, itemsize=4)
    codec.encode(values, wire)
    decoded = torch.full_like(values, float("nan"))
    codec.decode(wire, decoded)
    return decoded


@examples(60)
@given(
    kind=st.sampled_from(sorted(COMPRESSORS)),
    body=st.integers(1, 40),
    tail=st.integers(0, 3),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_what_is_lost_is_bounded(kind: str, body: int, tail: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(body + tail, generator=generator).to(dtype)
    values[body:] = torch.arange(tail).to(dtype)
    decoded = through(COMPRESSORS[kind], values, tail)
    assert torch.equal(decoded[body:], values[body:])
    lost = (decoded - values)[:body].abs()
    if kind in ("fp16", "bf16"):
        assert bool((lost <= values[:body].abs() * 2**-8 + 1e-7).all())
    elif kind == "int8":
        for block, error in zip(values[:body].split(7), lost.split(7), strict=True):
            assert float(error.max()) <= float(block.abs().max()) / 127 * 0.51
    else:
        kept = decoded[:body] != 0
        assert torch.allclose(decoded[:body][kept], values[:body][kept])
        assert int(kept.sum()) == -(-body // 5)
        assert not bool((~kept).any()) or float(values[:body][~kept].abs().max()) <= float(
            values[:body][kept].abs().min()
        )


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_an_overflow_stays_visible(kind: str, poison: float) -> None:
    values = torch.ones(20)
    values[3] = poison
    assert not bool(torch.isfinite(through(COMPRESSORS[kind], values, 0)).all())


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_zeros_stay_zero(kind: str) -> None:
    assert torch.equal(through(COMPRESSORS[kind], torch.zeros(11), 0), torch.zeros(11))


def test_half_precision_saturates() -> None:
    assert float(through(COMPRESSORS["fp16"], torch.tensor([1e6]), 0)) == torch.finfo(torch.float16).max


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_error_feedback_loses_nothing_over_time(kind: str) -> None:
    """The sum of what was decoded approaches the sum of what went in (Karimireddy et al., 2019)."""
    codec = make_codec(COMPRESSORS[kind], 50, 0)
    assert codec is not None
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(50)
    total = torch.zeros(50)
    steps = 60
    for _ in range(steps):
        values = gradient.clone()
        encode_with_feedback(codec, values, residual, torch.empty(codec.size, dtype=torch.uint8))
        total += values
    assert torch.allclose(total + residual, steps * gradient, atol=1e-3)
    assert float((total / steps - gradient).abs().max()) < 0.3


def test_an_overflow_does_not_stay_in_the_residual() -> None:
    codec = make_codec(COMPRESSORS["int8"], 8, 0)
    assert codec is not None
    values = torch.ones(8)
    residual = torch.zeros(8)
    values[0] = float("inf")
    encode_with_feedback(codec, values, residual, torch.empty(codec.size, dtype=torch.uint8))
    assert bool(torch.isfinite(residual).all())


def test_foreign_positions_are_refused() -> None:
    codec = make_codec(COMPRESSORS["topk"], 10, 0)
    assert codec is not None
    wire = torch.zeros(codec.size, dtype=torch.uint8)
    wire[:4].view(torch.int32).fill_(99)
    with pytest.raises(ValueError, match="out of range"):
        codec.decode(wire, torch.zeros(10))


def test_low_rank_layout_sends_small_things_whole() -> None:
    factors, lengths = low_rank_layout([(64, 32), (10,), (2, 2), (8, 3, 3, 3)], rank=2)
    assert [factor.rank for factor in factors] == [2, 0, 0, 2]
    assert lengths == (64 * 2 + 10 + 4 + 8 * 2, 32 * 2 + 27 * 2)


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
@pytest.mark.parametrize("compressor", [Compressor(), COMPRESSORS["fp16"]], ids=["none", "fp16"])
def test_memory_for_contributions_is_there_before_the_first_step(compressor: Compressor) -> None:
    numel = 32 << 20  # so large that the allocator takes new memory
    wire = CodedRange(torch.zeros(numel), 0, numel, numel, compressor, None).new_wire()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    wire.fill_(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100
