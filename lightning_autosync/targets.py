"""User code that a configuration names by ``_target_``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_autosync.documents import did_you_mean
from lightning_autosync.errors import DocumentError


def check_target(field: str, configuration: dict[str, Any] | None) -> None:
    """Check that a ``_target_`` can be imported.

    Raises:
        DocumentError: it cannot be imported; the message says why.
    """
    if configuration is not None and "_target_" in configuration:
        find(f"{field}._target_", configuration["_target_"])


def find(field: str, name: str) -> Any:
    """The object with a dotted name.

    Raises:
        DocumentError: it cannot be imported; the message says why.
    """
    from hydra.utils import get_object

    _add_working_directory()
    try:
        with _hydra_silent():
            return get_object(name)
    except Exception as error:  # imports of user code raise errors of all kinds
        raise DocumentError(f"{field}: '{name}' cannot be imported: {_why(name, error)}") from None


def make(field: str, configuration: dict[str, Any], kind: type = object) -> Any:
    """Instantiate ``configuration``.

    Raises:
        DocumentError: this fails, or the object is not a ``kind``.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    _add_working_directory()
    target = configuration.get("_target_")
    try:
        # "all" converts nested configurations to plain lists and mappings, which user code expects.
        made = instantiate(configuration, _convert_="all")
    except InstantiationException as error:
        raise DocumentError(f"{field}: '{target}': {_why(str(target), error)}") from error
    if not isinstance(made, kind):
        raise DocumentError(f"{field}._target_: '{target}' is {type(made).__name__}, no {kind.__name__}")
    return made


def make_arguments(field: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Plain arguments, in which values with a ``_target_`` are instantiated.

    Raises:
        DocumentError: an instantiation fails.
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
    """Silence Hydra's logger within the block: Hydra logs errors that it also raises."""
    logger = logging.getLogger("hydra.utils")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _why(name: str, error: BaseException) -> str:
    """Why a target failed: its module does not have it, or what the error says."""
    cause: BaseException | None = error
    while cause is not None:
        # Hydra looks for a module of that name where a module lacks an attribute.
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            parent, _, last = str(cause.name).rpartition(".")
            if parent:
                near = did_you_mean(last, [each for each in dir(sys.modules.get(parent)) if not each.startswith("_")])
                return f"module {parent} has no '{last}'{near and f'; {near}'}"
        cause = cause.__cause__
    return _line(error.__cause__ or error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _add_working_directory() -> None:
    """Append the working directory to ``sys.path``, so that its modules can be imported; workers inherit the path."""
    if os.getcwd() not in (os.path.abspath(path) for path in sys.path):
        sys.path.append(os.getcwd())
