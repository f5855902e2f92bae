"""Validation errors of pydantic as one line."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from lightning_autosync.documents.field_names import fields_at
from lightning_autosync.documents.text import MOST_SHOWN, shortened, shown


def describe_validation_error(error: ValidationError, data: Any = None, kind: Any = None) -> str:
    """One line: an unknown field, else the first problem, and the number of others.

    Args:
        data: what was validated.
        kind: the type that it was validated as, which gives the fields that are allowed; None if unknown.
    """
    problems: list[Any] = error.errors(include_url=False)
    # A list whose only item is wrong is also reported as too short, but the item's own error says more.
    problems = [problem for problem in problems if problem["type"] != "too_short"] or problems
    # An unknown field is often a misspelled one, which is reported as missing too.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    others = [problem for problem in problems if problem is not first]
    message = shortened(first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "), 5 * MOST_SHOWN)
    if first["type"] == "extra_forbidden":
        lacking = [problem for problem in others if _is_missing_beside(problem, first)]
        message, named = _unknown_field(first["loc"], [problem["loc"][-1] for problem in lacking], kind)
        others = [problem for problem in others if problem not in lacking or problem["loc"][-1] != named]
        if len(others) == 1 and others[0] in lacking:
            message, others = f"{message} (and '{others[0]['loc'][-1]}' is missing)", []
    elif first["type"] == "missing":
        message = "missing"
    elif "input" in first and not isinstance(first["input"], dict | list):
        message += f" (got {shown(first['input'])})"
    location = render_location(first["loc"], data)
    rest = f" (and {len(others)} more)" if others else ""
    return f"{shortened(location, 3 * MOST_SHOWN)}: {message}{rest}" if location else f"{message}{rest}"


def _is_missing_beside(problem: Any, unknown: Any) -> bool:
    """Whether a problem is a missing field of the object that has an unknown one."""
    return bool(problem["type"] == "missing" and problem["loc"][:-1] == unknown["loc"][:-1])


def _unknown_field(location: tuple[int | str, ...], lacking: Sequence[str], kind: Any) -> tuple[str, str]:
    """The message for an unknown field, and the field that was probably meant; empty if none is near."""
    name, allowed = str(location[-1]), fields_at(kind, location[:-1])
    for names in (lacking, allowed):  # what is missing was rather meant than what may be there already
        if near := get_close_matches(name, names, 1):
            return f"unknown field; did you mean '{near[0]}'?", near[0]
    told = f"; allowed: {shortened(', '.join(allowed), 3 * MOST_SHOWN)}" if allowed else ""
    return f"unknown field{told}", ""


def render_location(location: tuple[int | str, ...], data: Any) -> str:
    text = ""
    for part in location:
        if isinstance(data, dict):
            if part == data.get("kind"):
                continue  # pydantic also names the alternative of a discriminated union, which is not a field
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
