"""Rates, times and sizes as people write them: "200 Mbit/s", "50 us", "16 GiB".

Inside the package all quantities are floats in bytes/s, seconds or bytes, and a plain number is in that unit. Unit
names are case-sensitive, because Mbit and MB differ by a factor of eight.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_only
from pydantic import BeforeValidator, WithJsonSchema

PAYLOAD_SHARE = 1448 / 1514
"""Share of payload in a full Ethernet frame with TCP/IPv4 and TCP timestamps. Rates of links count whole frames."""
FRAMING = 1514 / 1448
"""Bytes on a link for each byte of payload in full frames."""


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTES_UNITS: Mapping[str, float] = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
RATE_UNITS: Mapping[str, float] = {
    **{f"{unit}/s": scale for unit, scale in BYTES_UNITS.items()},
    **{f"{prefix}bit/s": scale / 8 for prefix, scale in _DECIMAL.items()},
    **{f"{prefix}bps": scale / 8 for prefix, scale in _DECIMAL.items()},
}
SECONDS_UNITS: Mapping[str, float] = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "\N{MICRO SIGN}s": 1e-6,
    "\N{GREEK SMALL LETTER MU}s": 1e-6,
    "ns": 1e-9,
}

_RATE_FIELDS = ("bandwidth", "bandwidths", "reverse_bandwidth", "uplink", "local_bandwidth")
"""The fields of cluster files that are rates."""
_LATENCY_FIELDS = ("latency", "local_latency")
"""The fields of cluster files that are latencies."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s]*)")


LARGEST_RATE = 1e18
"""Largest rate in bytes/s."""
SMALLEST_RATE = 1e-3
"""Smallest rate in bytes/s."""
SLOWEST_BARE = 125e3
"""Rate in bytes/s (1 Mbit/s) below which a number without a unit was probably meant in another unit."""
LONGEST_BARE = 1.0
"""Latency in seconds from which a number without a unit was probably meant in another unit."""
LONGEST = 1e6
"""Largest time in seconds."""
LARGEST_SIZE = 1e18
"""Largest size in bytes."""


def parse_rate(value: Any) -> float:
    """A rate in bytes/s, from `SMALLEST_RATE` to `LARGEST_RATE`; raises ``ValueError`` for anything else."""
    rate = _above_zero(_parse(value, RATE_UNITS, "a rate such as '200 Mbit/s' or '1.5 GiB/s'"))
    if not SMALLEST_RATE <= rate <= LARGEST_RATE:
        raise ValueError(f"must be {SMALLEST_RATE:g} to {LARGEST_RATE:g} bytes/s")
    return rate


def warn_of_bare_numbers(data: Any, source: str) -> None:
    """Warn once if a cluster has numbers without a unit that were probably meant in another one.

    These are rates below `SLOWEST_BARE`, and latencies of `LONGEST_BARE` or more.

    Args:
        data: fields of the cluster, which were validated.
        source: the file that has them, or what made them.
    """
    found = list(_doubtful(data, "", ""))
    if found and not getattr(rank_zero_only, "rank", None):  # the command line has no rank
        place, number, units = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        warnings.warn(
            f"{source}: {place}: {number} is {number} {units.taken}{more}; write '{number} {units.usual}', or "
            f"'{number} {units.plain}' if that is meant",
            stacklevel=3,
        )


class _Units(NamedTuple):
    """Units of a quantity: the one that a number without a unit has, in words and as a unit, and a usual one."""

    taken: str
    plain: str
    usual: str


_RATE, _LATENCY = _Units("bytes/s", "B/s", "Mbit/s"), _Units("seconds", "s", "us")


def _doubtful(data: Any, place: str, field: str) -> Iterator[tuple[str, str, _Units]]:
    """The place, the number and the units of each such number within plain data."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _doubtful(value, f"{place}.{name}" if place else name, name)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _doubtful(value, f"{place}[{index}]", field)
    elif data is not None and not _QUANTITY.sub(r"\2", number := str(data).strip()):
        if field in _RATE_FIELDS and float(data) < SLOWEST_BARE:
            yield place, number, _RATE
        elif field in _LATENCY_FIELDS and float(data) >= LONGEST_BARE:
            yield place, number, _LATENCY


def parse_seconds(value: Any) -> float:
    """A time in seconds, from 0 to `LONGEST`; raises ``ValueError`` for anything else."""
    seconds = _parse(value, SECONDS_UNITS, "a time such as '50 us' or '1.5 ms'")
    if seconds < 0:
        raise ValueError("must be zero or more")
    if seconds > LONGEST:
        raise ValueError(f"must be {LONGEST:g} s at most")
    return seconds


def parse_bytes(value: Any) -> float:
    """A size in bytes, above 0 and up to `LARGEST_SIZE`; raises ``ValueError`` for anything else."""
    size = _above_zero(_parse(value, BYTES_UNITS, "a size such as '16 GiB' or '500 MB'"))
    if size > LARGEST_SIZE:
        raise ValueError(f"must be {LARGEST_SIZE:g} bytes at most")
    return size


def _parse(value: Any, units: Mapping[str, float], expected: str) -> float:
    if isinstance(value, str):
        number = _parse_text(value, units, expected)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf
    else:
        raise ValueError(f"expected a number or {expected}")
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number


def _parse_text(text: str, units: Mapping[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a number or {expected}")
    number, unit = match.groups()
    if not unit:
        return float(number)
    if unit not in units:
        raise ValueError(f"unknown unit '{unit}'; expected {expected} (units: {', '.join(units)})")
    return float(number) * units[unit]


def _above_zero(number: float) -> float:
    if number <= 0:
        raise ValueError("must be more than zero")
    return number


def _schema(description: str, **limits: float) -> WithJsonSchema:
    number = {"type": "number", **limits}
    return WithJsonSchema({"anyOf": [number, {"type": "string"}], "description": description})


Rate = Annotated[
    float, BeforeValidator(parse_rate), _schema("bytes/s, or with a unit", minimum=SMALLEST_RATE, maximum=LARGEST_RATE)
]
Seconds = Annotated[
    float, BeforeValidator(parse_seconds), _schema("seconds, or with a unit", minimum=0, maximum=LONGEST)
]
Bytes = Annotated[
    float, BeforeValidator(parse_bytes), _schema("bytes, or with a unit", exclusiveMinimum=0, maximum=LARGEST_SIZE)
]
