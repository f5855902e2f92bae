"""Validation errors of pydantic as one line."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lightning_autosync.documents.text import MOST_SHOWN, shortened, shown


def describe_validation_error(error: ValidationError, data: Any = None) -> str:
    """One line: an unknown field, else the first problem, and the number of others. ``data`` was validated."""
    problems = error.errors(include_url=False)
    # A list whose only item is wrong is also reported as too short, but the item's own error says more.
    problems = [problem for problem in problems if problem["type"] != "too_short"] or problems
    # An unknown field is often a misspelled one, which is reported as missing too.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    message = shortened(first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "), 5 * MOST_SHOWN)
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    elif first["type"] == "missing":
        message = "missing"
    elif "input" in first and not isinstance(first["input"], dict | list):
        message += f" (got {shown(first['input'])})"
    location = render_location(first["loc"], data)
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{shortened(location, 3 * MOST_SHOWN)}: {message}{rest}" if location else f"{message}{rest}"


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
