"""Validation errors of pydantic as one line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from lightning_autosync.documents.text import MOST_SHOWN, near_names, shortened, shown, unknown_name

_NAME = re.compile("'([^']*)'")
"""A name in pydantic's list of what is expected."""


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
    if first["type"] in ("tuple_type", "too_short", "too_long"):  # which a file and a user call a list
        message = message.replace("Tuple", "List").replace("tuple", "list")
    if first["type"] == "extra_forbidden":
        lacking = [problem for problem in others if _is_missing_beside(problem, first)]
        message, named = _unknown_field(first["loc"], [problem["loc"][-1] for problem in lacking], kind)
        others = [problem for problem in others if problem not in lacking or problem["loc"][-1] != named]
        if len(others) == 1 and others[0] in lacking:
            message, others = f"{message} (and '{others[0]['loc'][-1]}' is missing)", []
    elif first["type"] == "missing":
        message = "missing"
    elif names := _names_allowed(first):
        message = f"{shown(first['input'])} is {unknown_name(first['input'], names)}"
    elif "input" in first and not isinstance(first["input"], dict | list):
        message += f" (got {shown(first['input'])})"
    location = render_location(first["loc"], data)
    rest = f" (and {len(others)} more)" if others else ""
    return f"{shortened(location, 3 * MOST_SHOWN)}: {message}{rest}" if location else f"{message}{rest}"


def _names_allowed(problem: Any) -> list[str]:
    """The names of which a wrong text should have been one; empty if the problem is another one."""
    is_name = problem["type"] == "literal_error" and isinstance(problem["input"], str)
    return _NAME.findall(problem["ctx"]["expected"]) if is_name else []


def _is_missing_beside(problem: Any, unknown: Any) -> bool:
    """Whether a problem is a missing field of the object that has an unknown one."""
    return bool(problem["type"] == "missing" and problem["loc"][:-1] == unknown["loc"][:-1])


def _unknown_field(location: tuple[int | str, ...], lacking: Sequence[str], kind: Any) -> tuple[str, str]:
    """The message for an unknown field, and the field that was probably meant; empty if none is near."""
    name, allowed = str(location[-1]), fields_at(kind, location[:-1])
    for names in (lacking, allowed):  # what is missing was rather meant than what may be there already
        if near := near_names(name, names):
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


def fields_at(kind: Any, location: Sequence[int | str]) -> list[str]:
    """The names of fields that an object may have; empty if the type does not tell.

    Args:
        kind: type of the whole: a record, a dataclass, a collection or union of them, or None.
        location: where the object is, as pydantic says it.
    """
    kinds = list(_alternatives(kind))
    for part in location:
        inner = [found for one in kinds for found in _inside(one, part)]
        # A location also names the alternative of a union, which is no field.
        kinds = inner or kinds
    found = [list(fields) for one in kinds if (fields := _fields(one))]
    return found[0] if len(found) == 1 else []  # which of several alternatives was meant is not known


def _alternatives(kind: Any) -> Iterator[Any]:
    """The types that an annotation allows."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for one in get_args(kind):
            yield from _alternatives(one)
    else:
        yield kind


def _inside(kind: Any, part: int | str) -> Iterable[Any]:
    """The types of one field or item."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(part, int):
        is_sequence = isinstance(origin, type) and issubclass(origin, Sequence) and arguments
        return _alternatives(arguments[0]) if is_sequence else ()
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _alternatives(arguments[1])
    fields = _fields(kind)
    return _alternatives(fields[part]) if part in fields else ()


def _fields(kind: Any) -> dict[str, Any]:
    """The types of an object's fields by name; empty for other types."""
    if not isinstance(kind, type):
        return {}
    if issubclass(kind, BaseModel):
        found = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        return {**found, **dict.fromkeys(getattr(kind, "SHORT_FORMS", ()), Any)}
    return get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
