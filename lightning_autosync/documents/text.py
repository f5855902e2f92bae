"""Values, counts and digests as text."""

from __future__ import annotations

import hashlib
import json
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


def seconds_text(seconds: float) -> str:
    """Seconds as text in the unit that fits, with four digits: ``0.412 ms``, ``83.10 ms``, ``1.240 s``."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    decimals = next((count for limit, count in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:.{decimals}f} {unit}"


def canonical(data: Any) -> str:
    """The canonical JSON text of plain data, with sorted keys and without blanks."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """A digest of plain data with twelve hexadecimal digits."""
    return digest_text(canonical(data))


def digest_text(text: str) -> str:
    """The `digest` of the data with this canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
