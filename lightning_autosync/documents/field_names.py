"""The fields that a type allows at a place of its data, for errors about unknown ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel


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
