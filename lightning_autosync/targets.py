"""User code that a configuration names by ``_target_``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_autosync.errors import DocumentError


def check_target(field: str, configuration: dict[str, Any] | None) -> None:
    """Refuse a ``_target_`` that does not exist.

    Raises:
        DocumentError: it cannot be imported; the message says why.
    """
    if configuration is not None and "_target_" in configuration:
        find(f"{field}._target_", configuration["_target_"])


def find(field: str, name: str) -> Any:
    """The object of a dotted name.

    Raises:
        DocumentError: it cannot be imported; the message says why.
    """
    from hydra.utils import get_object

    _add_working_directory()
    try:
        with _hydra_silent():
            return get_object(name)
    except Exception as error:  # imports of user code raise errors of all kinds
        raise DocumentError(f"{field}: '{name}' cannot be imported: {_line(error.__cause__ or error)}") from None


def make(field: str, configuration: dict[str, Any], kind: type = object) -> Any:
    """The object that ``configuration`` describes, a ``kind``.

    Raises:
        DocumentError: it cannot be made, or is something else.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    _add_working_directory()
    target = configuration.get("_target_")
    try:
        made = instantiate(configuration, _convert_="all")
    except InstantiationException as error:
        raise DocumentError(f"{field}: '{target}': {_line(error.__cause__ or error)}") from error
    if not isinstance(made, kind):
        raise DocumentError(f"{field}._target_: '{target}' is {type(made).__name__}, no {kind.__name__}")
    return made


def make_arguments(field: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Plain arguments; values with a ``_target_`` inside are instantiated.

    Raises:
        DocumentError: one cannot be made.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    _add_working_directory()
    try:
        made: dict[str, Any] = instantiate(configuration, _convert_="all")
    except InstantiationException as error:
        raise DocumentError(f"{field}: {_line(error.__cause__ or error)}") from error
    return made


@contextmanager
def _hydra_silent() -> Iterator[None]:
    """Within the block Hydra does not log the error that it raises as well."""
    logger = logging.getLogger("hydra.utils")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _add_working_directory() -> None:
    """Let modules of the working directory be imported, after all that are installed; workers inherit the path."""
    if os.getcwd() not in (os.path.abspath(path) for path in sys.path):
        sys.path.append(os.getcwd())
