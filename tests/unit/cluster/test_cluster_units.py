from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autosync.cluster import parse_bytes, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200 Mbit/s", 25e6),
        ("10 Gbit/s", 1.25e9),
        ("1Gbps", 1.25e8),
        ("1.5 GiB/s", 1.5 * 2**30),
        ("3e2 kB/s", 3e5),
        (".5 MB/s", 5e5),
        ("8 bit/s", 1.0),
        ("1e9", 1e9),
        (12, 12.0),
    ],
)
def test_rates(text: Any, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50 us", 5e-5),
        ("50 \u00b5s", 5e-5),
        ("50 \u03bcs", 5e-5),
        ("1.5ms", 1.5e-3),
        ("20 ns", 2e-8),
        ("2 s", 2),
        (0, 0),
    ],
)
def test_times(text: Any, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("text", "size"), [("16 GiB", 2**34), ("500 MB", 5e8), ("1 B", 1), (4096, 4096)])
def test_sizes(text: Any, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("200 mbit/s", "unknown unit 'mbit/s'"),
        ("200 Mbit", "unknown unit 'Mbit'"),
        ("50 us", "unknown unit 'us'"),
        ("fast", "expected a number or a rate"),
        ("", "expected a number or a rate"),
        ("1 Gbit/s extra", "expected a number or a rate"),
        (True, "expected a number or a rate"),
        (None, "expected a number or a rate"),
        ("1e999 B/s", "must be finite"),
        (float("nan"), "must be finite"),
        (0, "more than zero"),
        ("-5 Mbit/s", "more than zero"),
    ],
)
def test_wrong_rates(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rate(value)


def test_signs() -> None:
    with pytest.raises(ValueError, match="zero or more"):
        parse_seconds("-1 us")
    with pytest.raises(ValueError, match="more than zero"):
        parse_bytes("0 GiB")


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_a_byte_is_eight_bits(number: float) -> None:
    assert parse_rate(f"{8 * number!r} Mbit/s") == pytest.approx(parse_rate(f"{number!r} MB/s"))
