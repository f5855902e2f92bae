"""Function calls in workers: how functions are named, and how errors come back."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.errors import InputError


def function_name(function: Callable[..., Any]) -> str:
    """The name ``package.module:name`` by which workers import a function.

    Raises:
        TypeError: workers cannot import the function under that name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found = f"{module}:{name}"
    if module in (None, "__main__") or name is None or not _leads_to(found, function):
        raise TypeError(f"workers cannot import {function!r}; pass a function defined at the top level of a module")
    return found


def find_function(name: str) -> Callable[..., Any]:
    """Import a function by a name from `function_name`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _leads_to(name: str, function: Callable[..., Any]) -> bool:
    try:
        return find_function(name) is function
    except (ImportError, AttributeError):
        return False


def describe(error: BaseException) -> dict[str, Any]:
    """The exception that is being handled as plain data: ``type``, ``message``, ``traceback`` and ``input``.

    ``input`` is true if the user's input is wrong, so that the message alone explains the error.
    """
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "input": isinstance(error, DocumentError),
    }


def wrong_input(errors: Mapping[int, Mapping[str, Any]], asked: Collection[int]) -> InputError | None:
    """The error to raise if all failed ranks report wrong input; else None. Equal messages are merged.

    Args:
        errors: by rank, errors as from `describe`, at least one.
        asked: all ranks that were called. If only some failed, the message names them.
    """
    if not all(error["input"] for error in errors.values()):
        return None
    ranks = sorted(errors)
    alike = len(errors) == len(asked)
    said = dict.fromkeys(f"{'' if alike else f'rank {rank}: '}{errors[rank]['message']}" for rank in ranks)
    first = errors[ranks[0]]
    return InputError("; ".join(said), ranks[0], first["traceback"], first["type"], first["message"])
