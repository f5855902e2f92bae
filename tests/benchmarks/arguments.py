"""Command lines of benchmarks that take ``key=value`` beside names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from lightning_autosync.documents import unknown_name


def read_arguments(
    benchmark: str, arguments: Sequence[str], defaults: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The values of all keys, and the words that are no ``key=value``; ends the process if a key is unknown."""
    given, names = dict(defaults), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            names.append(argument)
        elif key in defaults:
            given[key] = value
        else:
            sys.exit(f"{benchmark}: '{key}': {unknown_name(key, defaults)}")
    return given, names
