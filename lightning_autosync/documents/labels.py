"""Short labels for long names, as of parameters and messages: for pictures and tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_PARTS = re.compile(r"[^\W\d_]+|\d+|.", re.DOTALL)
"""Words of letters, whole numbers, and single other characters."""


def short_labels(names: Sequence[str], most: int) -> list[str]:
    """A label for each name: words are shortened in their middle, and numbers stay, so that layers can be told apart.

    With 28 characters, ``encoder.layers.11.attention.weight`` becomes ``enc…r.lay…s.11.att…n.wei…t``.

    Args:
        names: names; equal ones get equal labels.
        most: number of characters that a label should have at most. It has more where its numbers and the separators
            need them, or where different names would get the same label.
    """
    limits = {name: _limit(name, most) for name in names}
    while True:
        labels = {name: _shortened(name, limit) for name, limit in limits.items()}
        counts = Counter(labels.values())
        alike = [name for name, label in labels.items() if counts[label] > 1 and label != name]
        if not alike:
            return [labels[name] for name in names]
        for name in alike:
            limits[name] += 1


def _limit(name: str, most: int) -> int:
    """The largest number of characters of a word with which the label of ``name`` is short enough; at least 1."""
    longest = max(map(len, _PARTS.findall(name)), default=1)
    limits = range(longest, 1, -1) if len(name) > most else [longest]
    return next((limit for limit in limits if len(_shortened(name, limit)) <= most), 1)


def _shortened(name: str, limit: int) -> str:
    """The name, with at most ``limit`` characters of each of its words."""
    return "".join(part if part.isdecimal() else _word(part, limit) for part in _PARTS.findall(name))


def _word(word: str, limit: int) -> str:
    if len(word) <= limit:
        return word
    if limit < 5:  # too short for a beginning and an end
        return word[:limit]
    tail = (limit - 1) // 3
    return f"{word[: limit - 1 - tail]}…{word[len(word) - tail :]}"
