"""Values and counts as text, for errors and output."""

from __future__ import annotations

from typing import Any

MOST_SHOWN = 100
"""Number of characters of a wrong value in an error."""


def shown(value: Any) -> str:
    """A wrong value as text for errors."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python refuses to convert very long integers to text
        return f"a number of {value.bit_length()} bits"


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """The text, truncated to ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 plan``, ``2 plans``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
