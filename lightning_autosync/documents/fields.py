"""Types of fields: integers and durations with their bounds."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, Strict

LEAST, LONGEST = 1e-12, 1e9
"""Smallest and largest measured time in seconds."""
LARGEST = 2**53
"""Largest integer in a document: above it, floats cannot represent every integer."""
Integer = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST)]
"""An integer; ``true`` and ``\"2\"`` are refused."""
Index = Annotated[Integer, Field(ge=0)]
"""An integer of at least 0."""
Count = Annotated[Integer, Field(gt=0)]
"""An integer of at least 1."""
PositiveDuration = Annotated[float, Field(ge=LEAST, le=LONGEST)]
"""Measured seconds above zero."""
Duration = Annotated[float, Field(ge=0, le=LONGEST)]
"""Measured seconds, possibly zero."""
TimeOffset = Annotated[float, Field(ge=-LONGEST, le=LONGEST)]
"""Seconds since a reference time, possibly negative."""
Metric = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]
"""A number that a training that diverged does not have: NaN here, and null in a file, because JSON has no NaN."""
