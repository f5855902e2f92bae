"""Imports the modules that register topologies, codecs and builders, from this package and from others."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points

from lightning_autosync.errors import PlanError


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import all modules of ``package``, which is at ``path``."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def import_entry_points(group: str) -> None:
    """Import the modules that installed packages declare as entry points of ``group``.

    Raises:
        PlanError: the module of an entry point cannot be imported, or its registration is refused.
    """
    for point in entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            kind = group.rpartition(".")[2]
            raise PlanError(f"{kind}: entry point '{point.name}' ({point.value}) cannot be loaded: {error}") from error


def mismatch(function: Callable[..., object], pattern: Callable[..., object]) -> str:
    """Why ``function`` cannot be called like ``pattern``; empty if it can.

    Positional parameters may have other names. ``function`` may have further parameters with defaults.
    """
    own, wanted = (list(inspect.signature(one).parameters.values()) for one in (function, pattern))
    by_name = {one.name: one for one in own}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in own)
    positional = [one for one in own if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in wanted if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(needed) or any(one.default is one.empty for one in positional[len(needed) :]):
        names = ", ".join(one.name for one in needed)
        return f"it takes {len(positional)} positional arguments, but must take {len(needed)}: {names}"
    keywords = {one.name for one in wanted if one.kind is one.KEYWORD_ONLY}
    for name in sorted(keywords - by_name.keys()):
        if not takes_any:
            return f"it must take the keyword argument '{name}'"
    for one in own:
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name not in keywords:
            return f"its keyword argument '{one.name}' needs a default"
    return ""
