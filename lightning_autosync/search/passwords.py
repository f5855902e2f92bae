"""Keeps passwords in database URLs out of files, messages and command lines of child processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

VARIABLE = "AUTOSYNC_STORAGE_"
"""Prefix of environment variables for URLs; a number follows."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S+")


def without_password(storage: str) -> str:
    """The URL of a storage with its password replaced by stars."""
    if "://" not in storage:
        return storage
    try:
        shown = make_url(storage).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # not a valid URL: hide everything that could be a password
        shown = re.sub(r"(://[^:]*):.*@", r"\1:***@", storage)
    # An unescaped password may contain @. SQLAlchemy may stop at the first one, so hide everything up to the last.
    shown = re.sub(r"(://[^/?]*:)[^/?]*@", r"\1***@", shown)
    return re.sub(r"([?&][^=&]*pass(?:word|wd)[^=&]*=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def without_passwords(text: str) -> str:
    """A text with all passwords in URLs replaced by stars."""
    return _ADDRESS.sub(lambda found: without_password(found[0]), text)


def without_passwords_in(data: Any) -> Any:
    """Plain data with all passwords in URLs replaced by stars."""
    if isinstance(data, dict):
        return {name: without_passwords_in(value) for name, value in data.items()}
    if isinstance(data, list):
        return [without_passwords_in(value) for value in data]
    return without_password(data) if isinstance(data, str) else data


def has_password(value: Any) -> bool:
    """Whether a value is a URL with a password."""
    if not isinstance(value, str) or "://" not in value or "${" in value:
        return False
    secret = re.compile(r"://[^/?]*:[^/?]+@|[?&][^=&]*pass(?:word|wd)[^=&]*=[^&]", re.IGNORECASE)
    if secret.search(value) is not None:
        return True
    try:  # SQLAlchemy also finds passwords with characters that should have been escaped
        return bool(make_url(value).password)
    except (ArgumentError, ValueError):
        return False


def hide_passwords(arguments: Sequence[str]) -> list[str]:
    """Hydra overrides with ``${oc.env:...}`` instead of each URL that has a password.

    Hydra writes overrides and configurations to files, but keeps interpolations unresolved there. So the URL moves to
    the environment, which child processes inherit.
    """
    return [_override(argument) if "://" in argument else argument for argument in arguments]


def as_environment_variable(address: str) -> str:
    """Put a URL into the environment; returns an interpolation for it, valid here and in child processes."""
    held = {value: name for name, value in os.environ.items() if name.startswith(VARIABLE)}
    name = held.get(address, f"{VARIABLE}{len(held) + 1}")
    os.environ[name] = address
    return f"${{oc.env:{name}}}"


def _override(argument: str) -> str:
    key, equals, given = argument.partition("=")
    variables = {written: as_environment_variable(address) for address, written in _addresses(argument, given)}
    for written in sorted(variables, key=len, reverse=True):  # longest first, since one may be a prefix of another
        given = given.replace(written, f"'{variables[written]}'")
    return f"{key}{equals}{given}"


def _addresses(argument: str, given: str) -> Iterator[tuple[str, str]]:
    """URLs with passwords in an override, and the text of each as written there."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override, QuotedString
    from hydra.errors import HydraException

    try:
        values = list(_leaves(OverridesParser.create().parse_override(argument)._value))
    except HydraException:  # characters that need quotes: treat the whole value as one URL
        values = [given]
    for value in values:
        text = value.text if isinstance(value, QuotedString) else value
        if has_password(text):
            quoted = value.with_quotes() if isinstance(value, QuotedString) else None
            forms = [quoted, text, Override._get_value_element_as_str(text)]
            yield text, next((form for form in forms if form and form in given), given)


def _leaves(value: Any) -> Iterator[Any]:
    """The scalar values within an override's value."""
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "list"):  # a sweep over choices
        value = value.list
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
