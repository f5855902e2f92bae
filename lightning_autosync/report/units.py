"""Quantities as reports write them."""

from __future__ import annotations


def milliseconds(seconds: float) -> str:
    """``12.3 ms``, with as many digits as a reader can use."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def rate_text(rate: float) -> str:
    """``400 Mbit/s`` of bytes/s."""
    bits = 8 * rate
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
