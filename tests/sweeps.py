"""What ``make test`` leaves to ``make test-all``: most cases of a sweep, most examples of a property."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import hypothesis
import pytest

SHARE = 1.0 if os.environ.get("AUTOSYNC_ALL_TESTS") else 0.15
"""The part of a property's examples that is drawn."""


def examples(count: int = 100, **options: Any) -> hypothesis.settings:
    """The settings of a property that ``make test-all`` tries on ``count`` examples."""
    return hypothesis.settings(max_examples=max(3, round(SHARE * count)), deadline=None, **options)


def sweep(cases: Iterable[Any], short: Collection[Any], ids: Any = None) -> list[Any]:
    """All cases, of which those outside ``short`` run in ``make test-all`` only."""
    cases = list(cases)
    unknown = [case for case in short if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    marks = [() if case in short else pytest.mark.slow for case in cases]
    names = [ids(case) if ids else None for case in cases]
    return [pytest.param(case, marks=mark, id=name) for case, mark, name in zip(cases, marks, names, strict=True)]


def crossed(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs of two lists, of which ``make test`` runs as few as have each value once."""
    kept = {(place % len(first), place % len(second)) for place in range(max(len(first), len(second)))}
    return [
        pytest.param(*_values(one), *_values(other), marks=() if (row, column) in kept else pytest.mark.slow)
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    """The arguments of a case, which may be several."""
    return case if isinstance(case, tuple) else (case,)
