"""How long the processes of a job bear each other's silence, as users state it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from lightning_autosync.errors import DocumentError
from lightning_autosync.relaxed.heartbeat import HeartbeatSettings

STALL = 60.0
"""Seconds without progress after which a group's average is given up, unless a job says otherwise."""


def read_heartbeat(given: HeartbeatSettings | Mapping[str, float] | None) -> HeartbeatSettings:
    """Settings by name; what is not named stays as it is by default.

    Raises:
        DocumentError: a name is unknown, a value is no number, or they do not fit each other.
    """
    if given is None or isinstance(given, HeartbeatSettings):
        return given or HeartbeatSettings()
    allowed = ", ".join(field.name for field in fields(HeartbeatSettings))
    if not isinstance(given, Mapping):
        raise DocumentError(f"heartbeat: {given!r} is no mapping of {allowed}")
    if unknown := sorted(set(given) - {field.name for field in fields(HeartbeatSettings)}):
        raise DocumentError(f"heartbeat.{unknown[0]}: not known; allowed: {allowed}")
    return HeartbeatSettings(**{name: read_seconds(f"heartbeat.{name}", value) for name, value in given.items()})


def read_seconds(name: str, value: object) -> float:
    """A finite number above 0, which errors call ``name``.

    Raises:
        DocumentError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DocumentError(f"{name}: {value!r} is no finite number above 0")
    return float(value)
