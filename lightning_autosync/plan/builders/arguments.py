"""Arguments of builders that a user gives: their names, types and bounds are those of the function's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, get_type_hints

import numpy
from pydantic import ValidationError, create_model

from lightning_autosync.documents import Record, describe_validation_error
from lightning_autosync.errors import PlanError


def checked(builder: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the builder takes them; whole numbers may be written as 4e6, and be numpy's.

    Raises:
        PlanError: the builder has no argument of that name.
        ValidationError: a value is not what it takes.
    """
    form = _form(builder)
    for name in arguments:
        if name not in form.model_fields:
            taken = ", ".join(form.model_fields) or "none"
            raise PlanError(f"builder '{builder.__name__}' has no argument '{name}'; it takes {taken}")
    record = form(**{name: _plain(value) for name, value in arguments.items()})
    return {name: getattr(record, name) for name in arguments}


@contextmanager
def told_of(builder: Callable[..., Any]) -> Iterator[None]:
    """Wherever types refuse a value within, the error is ours and names the builder.

    Raises:
        PlanError: they did.
    """
    try:
        yield
    except ValidationError as error:
        raise PlanError(f"builder '{builder.__name__}': {describe_validation_error(error)}") from None


@cache
def _form(builder: Callable[..., Any]) -> type[Record]:
    """The keyword arguments of a builder as a record; made once, for a search builds plans all the time."""
    hints = get_type_hints(builder, include_extras=True)
    parameters = inspect.signature(builder).parameters.values()
    fields: dict[str, Any] = {
        one.name: (hints[one.name], one.default) for one in parameters if one.kind is one.KEYWORD_ONLY
    }
    return create_model(builder.__name__, __base__=Record, **fields)


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, numpy.generic | numpy.ndarray) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
