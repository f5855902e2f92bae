"""Keeps passwords in database URLs out of files, messages and command lines of child processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

VARIABLE = "AUTOSYNC_STORAGE_"
"""Prefix of environment variables that hold addresses or parts of passwords; a number follows."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_PUNCTUATION = ":;,.!?()'\""
"""Characters that may follow an address in a text. They may also be the end of a password in its query."""
_INTERPOLATION = re.compile(r"\$\{[^{}]*\}")
_FILLED = "\0"
"""Stands for each character of an interpolation where passwords are looked for."""
_PASSWORDS = (
    re.compile(r"://[^:/?@]*:(.+)@"),
    re.compile(r"[?&][^=&]*pass(?:word|wd)[^=&]*=([^&]+)", re.IGNORECASE),
)
"""Passwords in addresses with interpolations, which SQLAlchemy cannot read."""


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

    def hidden(found: re.Match[str]) -> str:
        address = found[0] if _PASSWORDS[1].search(found[0]) else found[0].rstrip(_PUNCTUATION)
        return without_password(address) + found[0][len(address) :]

    return _ADDRESS.sub(hidden, text)


def without_passwords_in(data: Any) -> Any:
    """Plain data with all passwords in URLs replaced by stars."""
    if isinstance(data, dict):
        return {name: without_passwords_in(value) for name, value in data.items()}
    if isinstance(data, list):
        return [without_passwords_in(value) for value in data]
    return without_password(data) if isinstance(data, str) else data


def has_password(value: Any) -> bool:
    """Whether a value is an address with a password; one that is all interpolations does not count."""
    if not isinstance(value, str) or "://" not in value:
        return False
    if "${" in value:
        return bool(_literal_parts(value))
    secret = re.compile(r"://[^/?]*:[^/?]+@|[?&][^=&]*pass(?:word|wd)[^=&]*=[^&]", re.IGNORECASE)
    if secret.search(value) is not None:
        return True
    try:  # SQLAlchemy also finds passwords with characters that should have been escaped
        return bool(make_url(value).password)
    except (ArgumentError, ValueError):
        return False


def places_of_passwords(data: Any, place: str = "") -> Iterator[str]:
    """The keys of plain data under which there are addresses with passwords, as ``study.storage``."""
    if isinstance(data, dict | list):
        named = data.items() if isinstance(data, dict) else enumerate(data)
        for name, value in named:
            yield from places_of_passwords(value, f"{place}.{name}" if place else str(name))
    elif has_password(data):
        yield place


def hide_passwords(arguments: Sequence[str]) -> list[str]:
    """Hydra overrides with ``${oc.env:...}`` instead of each URL that has a password.

    Hydra writes overrides and configurations to files, but keeps interpolations unresolved there. So the URL moves to
    the environment, which child processes inherit.
    """
    return [_override(argument) if "://" in argument else argument for argument in arguments]


def with_hidden_password(address: str) -> str:
    """What stands for an address with a password in configurations, here and in child processes.

    It is an interpolation of an environment variable with the address. An address that has interpolations keeps them,
    because those in variables are not resolved; variables stand for the rest of its password.
    """
    if "${" not in address:
        return _as_environment_variable(address)
    for start, end in reversed(_literal_parts(address)):
        address = address[:start] + _as_environment_variable(address[start:end]) + address[end:]
    return address


def _literal_parts(address: str) -> list[tuple[int, int]]:
    """Begin and end of each part of the passwords in an address that is in no interpolation, in order."""
    filled, count = address, 1
    while count:  # an interpolation may hold others
        filled, count = _INTERPOLATION.subn(lambda found: _FILLED * len(found[0]), filled)
    spans = sorted({found.span(1) for pattern in _PASSWORDS for found in pattern.finditer(filled)})
    literal = re.compile(f"[^{_FILLED}]+")
    return [part.span() for start, end in spans for part in literal.finditer(filled, start, end)]


def _as_environment_variable(text: str) -> str:
    """Put a text into the environment; the interpolation that stands for it."""
    held = {value: name for name, value in os.environ.items() if name.startswith(VARIABLE)}
    free = next(name for number in count(1) if (name := f"{VARIABLE}{number}") not in os.environ)
    name = held.get(text, free)
    os.environ[name] = text
    return f"${{oc.env:{name}}}"


def _override(argument: str) -> str:
    key, equals, given = argument.partition("=")
    shown = {written: with_hidden_password(address) for address, written in _addresses(argument, given)}
    for written in sorted(shown, key=len, reverse=True):  # one may be the beginning of another
        quoted = shown[written].replace("'", "\\'")
        given = given.replace(written, f"'{quoted}'")
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
