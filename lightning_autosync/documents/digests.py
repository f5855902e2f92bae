"""Canonical text and digests of plain data."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical(data: Any) -> str:
    """The canonical JSON text of plain data, with sorted keys and without blanks."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """A digest of plain data with twelve hexadecimal digits."""
    return digest_text(canonical(data))


def digest_text(text: str) -> str:
    """The `digest` of the data with this canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
