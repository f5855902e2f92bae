"""Passwords in the addresses of databases: not for files, messages, or the command lines of other processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

VARIABLE = "AUTOSYNC_STORAGE_"
"""How environment variables begin that hold the addresses of a command line, in the order in which they stand there."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S+")


def without_password(storage: str) -> str:
    """The address of a storage with stars for the password in it, if there is one."""
    if "://" not in storage:
        return storage
    try:
        shown = make_url(storage).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # no address: whatever could be a password goes
        shown = re.sub(r"(://[^:]*):.*@", r"\1:***@", storage)
    # Of several @ the last ends what is secret, wherever others take it to end.
    shown = re.sub(r"(://[^/?]*:)[^/?]*@", r"\1***@", shown)
    return re.sub(r"([?&][^=&]*pass(?:word|wd)[^=&]*=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def without_passwords(text: str) -> str:
    """Any text with stars for the passwords in the addresses that it has."""
    return _ADDRESS.sub(lambda found: without_password(found[0]), text)


def has_password(value: Any) -> bool:
    """Whether this is an address with a password in it."""
    if not isinstance(value, str) or "://" not in value or "${" in value:
        return False
    secret = re.compile(r"://[^/?]*:[^/?]+@|[?&][^=&]*pass(?:word|wd)[^=&]*=[^&]", re.IGNORECASE)
    return secret.search(value) is not None


def by_environment(arguments: Sequence[str]) -> list[str]:
    """Overrides of Hydra with ``${oc.env:...}`` for each address that has a password, which is in the environment then.

    Hydra writes overrides and what comes of them to files; interpolations it writes as they are. Processes that this
    one starts find the address in the environment, too.
    """
    return [_override(argument) if "://" in argument else argument for argument in arguments]


def in_environment(address: str) -> str:
    """An interpolation that stands for the address from now on, here and in processes that this one starts."""
    held = {value: name for name, value in os.environ.items() if name.startswith(VARIABLE)}
    name = held.get(address, f"{VARIABLE}{len(held) + 1}")
    os.environ[name] = address
    return f"${{oc.env:{name}}}"


def _override(argument: str) -> str:
    key, equals, given = argument.partition("=")
    told = {written: in_environment(address) for address, written in _addresses(argument, given)}
    for written in sorted(told, key=len, reverse=True):  # one may be the beginning of another
        given = given.replace(written, f"'{told[written]}'")
    return f"{key}{equals}{given}"


def _addresses(argument: str, given: str) -> Iterator[tuple[str, str]]:
    """Addresses with passwords in an override, and how each is written there."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override, QuotedString
    from hydra.errors import HydraException

    try:
        values = list(_leaves(OverridesParser.create().parse_override(argument)._value))
    except HydraException:  # characters that would need quotes: it is one address, or nothing that can be used
        values = [given]
    for value in values:
        text = value.text if isinstance(value, QuotedString) else value
        if has_password(text):
            quoted = value.with_quotes() if isinstance(value, QuotedString) else None
            forms = [quoted, text, Override._get_value_element_as_str(text)]
            yield text, next((form for form in forms if form and form in given), given)


def _leaves(value: Any) -> Iterator[Any]:
    """The single values of an override's value."""
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "list"):  # a sweep over choices
        value = value.list
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
