"""The rows of messages in a picture: one for each message, or one for each layer where there are too many."""

from __future__ import annotations

import re
from collections.abc import Sequence

Row = tuple[str, Sequence[int]]
"""The label of a row, and the indices of its messages."""
MOST_ROWS = 100
"""Largest number of rows."""
_PARTS = re.compile(r"[./]")


def timeline_rows(names: Sequence[str], most: int = MOST_ROWS) -> list[Row]:
    """The rows for messages with these names.

    Up to ``most`` messages have a row each. Otherwise the messages of a layer share one. Layers are parts of a model's
    path, as deep as they leave at most ``most`` rows: ``encoder.11.attention``, then ``encoder.11``, then ``encoder``.
    Names without a path, as of fused messages, share rows in their order: ``bucket0 to bucket3``.

    Args:
        names: names of the messages in schedule order.
        most: largest number of rows.

    Returns:
        The rows, in the order of their first messages. A label of several messages ends with their number:
        ``encoder.11 (12)``.
    """
    if len(names) <= most:
        return [(name, [index]) for index, name in enumerate(names)]
    paths = [_PARTS.split(name) for name in names]
    for depth in range(max(map(len, paths)) - 1, 0, -1):
        layers = _gathered([".".join(path[:depth]) for path in paths])
        if 1 < len(layers) <= most:
            return [_counted(layer, members) for layer, members in layers.items()]
    length = -(-len(names) // most)
    runs = [range(start, min(start + length, len(names))) for start in range(0, len(names), length)]
    return [_counted(f"{names[run[0]]} to {names[run[-1]]}" if len(run) > 1 else names[run[0]], run) for run in runs]


def _gathered(keys: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return found


def _counted(label: str, members: Sequence[int]) -> Row:
    return (label if len(members) == 1 else f"{label} ({len(members)})"), members
