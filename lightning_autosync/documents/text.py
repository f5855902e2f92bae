"""Values, counts, digests and long names as text."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

MOST_SHOWN = 100
"""Number of characters of a wrong value in an error."""
_MOST_ALLOWED = 1000
"""Number of characters of a list of allowed names. Clusters may have thousands of nodes."""


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


def bytes_text(size: float) -> str:
    """Bytes as text in the unit that fits, with three digits at most: ``412 B``, ``26 kB``, ``8.29 MB``, ``1.2 GB``."""
    text, unit = f"{size:.3g}", "B"
    for scale, larger in ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")):
        if float(text) >= 1000:
            text, unit = f"{size / scale:.3g}", larger
    return f"{float(text):.0f} {unit}" if "e" in text else f"{text} {unit}"


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] = "'{}'".format, most: int = 1) -> str:
    """A question for an error about a wrong name: ``did you mean 'this' or 'that'?``; empty if no name is near.

    Args:
        name: the wrong name.
        known: the right names; upper and lower case count as equal.
        show: how a right name is shown.
        most: how many names are suggested at most, the nearest first.
    """
    near = near_names(name, known, most)
    return f"did you mean {' or '.join(map(show, near))}?" if near else ""


def near_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The names in ``known`` that a wrong name may mean, ``most`` at most, the nearest first; see `did_you_mean`."""
    names = {each.casefold(): each for each in known}
    return [names[each] for each in get_close_matches(name.casefold(), names, most)]


def unknown_name(name: Any, known: Collection[str], most: int = 1) -> str:
    """The end of an error about a wrong name: that it is not among ``known``, and `allowed_names`."""
    return f"not known; {allowed_names(name, known, most)}"


def allowed_names(name: Any, known: Collection[str], most: int = 1) -> str:
    """The names that are allowed in place of a wrong one: first the nearest, ``most`` at most, and then all."""
    near = did_you_mean(str(name), known, most=most)
    return f"{near and f'{near} '}allowed: {shortened(', '.join(known), _MOST_ALLOWED) or 'none'}"


def canonical(data: Any) -> str:
    """The canonical JSON text of plain data, with sorted keys and without blanks."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """A digest of plain data with twelve hexadecimal digits."""
    return digest_text(canonical(data))


def digest_text(text: str) -> str:
    """The `digest` of the data with this canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def table_text(table: Table, width: int) -> str:
    """A table as text without colours, ``width`` characters wide at most."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=width, force_terminal=False).print(table)
    return text.getvalue()


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
